#ifndef XLA_PLUGIN_BASE_CHECKED_H_
#define XLA_PLUGIN_BASE_CHECKED_H_

#include <cstddef>
#include <cstring>
#include <string_view>
#include <type_traits>
#include <utility>

#include "xla_plugin/base/error.h"

namespace jaxhet {

// Removes a T from the front of `text`. Throws TransportError, which calls the text `what`, if it
// is too short.
template <typename T>
T Take(std::string_view& text, std::string_view what) {
  static_assert(std::is_trivially_copyable_v<T>);
  T info{};
  if (text.size() < sizeof info) Throw(ErrorCode::kTransport, what, " is cut");
  std::memcpy(&info, text.data(), sizeof info);
  text.remove_prefix(sizeof info);
  return info;
}

// A narrowing that must not change the value; throws UsageError if it would.
template <typename To, typename From>
To CheckedCast(From value) {
  if (!std::in_range<To>(value)) Throw(ErrorCode::kUsage, value, " is out of range");
  return static_cast<To>(value);
}

// True if [offset, offset + num_bytes) lies in [0, total), for any values of the three.
inline bool InBounds(size_t offset, size_t num_bytes, size_t total) {
  return offset <= total && num_bytes <= total - offset;
}

inline size_t CheckedMultiply(size_t a, size_t b) {
  size_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) Throw(ErrorCode::kUsage, a, " x ", b, " overflows");
  return product;
}

// The next multiple of `unit`.
constexpr size_t RoundUp(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace jaxhet

#endif  // XLA_PLUGIN_BASE_CHECKED_H_
