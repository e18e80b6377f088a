#ifndef TESTS_GPU_DEVICE_TESTING_H_
#define TESTS_GPU_DEVICE_TESTING_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "xla_plugin/base/error.h"
#include "xla_plugin/device/device.h"

// Helpers for tests of the device layer on real GPUs.
namespace jaxhet::testing {

struct Skip : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Setup {
  std::string vendor;
  std::string library;
  std::string test;
  std::string peer_visible;  // CUDA_VISIBLE_DEVICES of the second process

  std::unique_ptr<Device> Open(int ordinal = 0) const;
  std::vector<DeviceInfo> List() const;
};

// By name.
using Tests = std::map<std::string, void (*)(const Setup&)>;
Tests OneProcessTests();
// The second process of test x runs x-peer.
Tests TwoProcessTests();

void Expect(bool condition, std::string_view what);
// A DeviceError.
void ExpectWords(const std::function<void()>& function, std::string_view words);

inline std::byte* Bytes(void* address) { return static_cast<std::byte*>(address); }
void Fill(void* address, size_t num_bytes, unsigned seed);
bool IsFilled(const void* address, size_t num_bytes, unsigned seed);

void PrintTurns(uint32_t turns, std::chrono::steady_clock::time_point begin);

}  // namespace jaxhet::testing

#endif  // TESTS_GPU_DEVICE_TESTING_H_
