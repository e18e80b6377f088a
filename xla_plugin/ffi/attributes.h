#ifndef XLA_PLUGIN_FFI_ATTRIBUTES_H_
#define XLA_PLUGIN_FFI_ATTRIBUTES_H_

#include <array>
#include <cstdint>
#include <span>

#include "xla/ffi/api/ffi.h"
#include "xla_plugin/base/error.h"

namespace jaxhet {

// Indexed by ErrorCode.
inline constexpr std::array<xla::ffi::ErrorCode, kErrorNames.size()> kFfiCodes = {
    xla::ffi::ErrorCode::kInvalidArgument, xla::ffi::ErrorCode::kFailedPrecondition,
    xla::ffi::ErrorCode::kUnavailable,     xla::ffi::ErrorCode::kDeadlineExceeded,
    xla::ffi::ErrorCode::kUnavailable,     xla::ffi::ErrorCode::kInternal};

inline xla::ffi::Error ToFfiError(const Error& error) {
  return {kFfiCodes.at(static_cast<size_t>(error.code())), error.what()};
}

inline std::span<const std::byte> Bytes(const xla::ffi::AnyBuffer& buffer) {
  return {static_cast<const std::byte*>(buffer.untyped_data()), buffer.size_bytes()};
}

inline std::span<std::byte> Bytes(xla::ffi::Result<xla::ffi::AnyBuffer>& buffer) {
  return {static_cast<std::byte*>(buffer->untyped_data()), buffer->size_bytes()};
}

// Attributes of a call, in the order of the handlers' parameters. The engine knows the rest by the
// plan.
template <typename Binding>
auto BindAttributes(Binding binding) {
  return std::move(binding)
      .template Attr<int64_t>("session")
      .template Attr<int64_t>("plan")
      .template Attr<int64_t>("index");
}

}  // namespace jaxhet

#endif  // XLA_PLUGIN_FFI_ATTRIBUTES_H_
