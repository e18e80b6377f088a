#ifndef XLA_PLUGIN_DEVICE_FAILURE_H_
#define XLA_PLUGIN_DEVICE_FAILURE_H_

#include <string>
#include <string_view>

namespace jaxhet {

// The results of CUDA's driver and of HIP that we tell apart; both number them alike.
inline constexpr int kGpuSuccess = 0;
inline constexpr int kGpuInvalidValue = 1;
inline constexpr int kGpuOutOfMemory = 2;
inline constexpr int kGpuNoDevice = 100;
inline constexpr int kGpuInvalidDevice = 101;
inline constexpr int kGpuInvalidContext = 201;
inline constexpr int kGpuOperatingSystem = 304;
inline constexpr int kGpuInvalidHandle = 400;
inline constexpr int kGpuNotFound = 500;
inline constexpr int kGpuNotReady = 600;
inline constexpr int kGpuIllegalAddress = 700;
inline constexpr int kGpuLaunchFailed = 719;
inline constexpr int kGpuNotSupported = 801;

// A result in the vendor's words.
struct FailureText {
  int code;
  std::string_view name;
  std::string_view text;
};

// Throws DeviceError "<call> on <where> failed: <name> (<code>), <text>. <what to do>".
[[noreturn]] void ThrowFailure(std::string_view call, std::string_view where,
                               const FailureText& failure);

}  // namespace jaxhet

#endif  // XLA_PLUGIN_DEVICE_FAILURE_H_
