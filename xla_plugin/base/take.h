#ifndef XLA_PLUGIN_BASE_TAKE_H_
#define XLA_PLUGIN_BASE_TAKE_H_

#include <cstring>
#include <string_view>
#include <type_traits>

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

}  // namespace jaxhet

#endif  // XLA_PLUGIN_BASE_TAKE_H_
