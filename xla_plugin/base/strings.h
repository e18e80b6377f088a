#ifndef XLA_PLUGIN_BASE_STRINGS_H_
#define XLA_PLUGIN_BASE_STRINGS_H_

#include <sstream>
#include <string>

namespace jaxhet {

template <typename... Args>
std::string StrCat(const Args&... args) {
  std::ostringstream out;
  (out << ... << args);
  return std::move(out).str();
}

}  // namespace jaxhet

#endif  // XLA_PLUGIN_BASE_STRINGS_H_
