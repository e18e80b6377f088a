#ifndef XLA_PLUGIN_BASE_STRINGS_H_
#define XLA_PLUGIN_BASE_STRINGS_H_

#include <array>
#include <charconv>
#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

namespace jaxhet {

// Numbers are written without streams: those need a locale, and a module that brings a C++ runtime
// of its own (-static-libstdc++) may find another one's.
template <typename T>
void AppendTo(std::string& text, const T& value) {
  if constexpr (std::convertible_to<T, std::string_view>) {
    text += std::string_view(value);
  } else if constexpr (std::same_as<T, char>) {
    text += value;
  } else if constexpr (std::is_pointer_v<T>) {
    std::array<char, 20> digits{};
    const auto address = reinterpret_cast<uintptr_t>(value);
    text.append("0x").append(digits.data(),
                             std::to_chars(digits.begin(), digits.end(), address, 16).ptr);
  } else {
    std::array<char, 32> digits{};
    const char* const end = std::to_chars(digits.begin(), digits.end(), value).ptr;
    text += std::string_view(digits.data(), end);  // GCC 12 warns of append(begin, end)
  }
}

template <typename... Args>
std::string StrCat(const Args&... args) {
  std::string text;
  (AppendTo(text, args), ...);
  return text;
}

}  // namespace jaxhet

#endif  // XLA_PLUGIN_BASE_STRINGS_H_
