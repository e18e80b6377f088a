#include "tests/gpu/device_testing.h"

#include <array>
#include <cstdio>

namespace jaxhet::testing {

std::unique_ptr<Device> Setup::Open(int ordinal) const {
  const std::array<const char*, 1> libraries = {library.c_str()};
  return VendorOf(vendor).open(libraries, ordinal);
}

std::vector<DeviceInfo> Setup::List() const {
  const std::array<const char*, 1> libraries = {library.c_str()};
  return VendorOf(vendor).list(libraries);
}

void Expect(bool condition, std::string_view what) {
  if (!condition) Throw(ErrorCode::kDevice, "wrong: ", what);
}

void ExpectWords(const std::function<void()>& function, std::string_view words) {
  try {
    function();
  } catch (const Error& error) {
    std::printf("  %s\n", error.what());
    Expect(error.code() == ErrorCode::kDevice, "the error's class");
    Expect(error.text().find(words) != std::string_view::npos, words);
    return;
  }
  Throw(ErrorCode::kDevice, "no error with ", words);
}

void Fill(void* address, size_t num_bytes, unsigned seed) {
  for (size_t i = 0; i < num_bytes; ++i) Bytes(address)[i] = static_cast<std::byte>(i * 7 + seed);
}

bool IsFilled(const void* address, size_t num_bytes, unsigned seed) {
  const auto* const bytes = static_cast<const std::byte*>(address);
  for (size_t i = 0; i < num_bytes; ++i) {
    if (bytes[i] != static_cast<std::byte>(i * 7 + seed)) return false;
  }
  return true;
}

void PrintTurns(uint32_t turns, std::chrono::steady_clock::time_point begin) {
  const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - begin;
  std::printf("  %u turns, %.1f us each\n", turns, time.count() / turns);
}

}  // namespace jaxhet::testing
