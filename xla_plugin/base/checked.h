#ifndef XLA_PLUGIN_BASE_CHECKED_H_
#define XLA_PLUGIN_BASE_CHECKED_H_

#include <cstddef>
#include <utility>

#include "xla_plugin/base/error.h"

namespace jaxhet {

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
