#ifndef TESTS_CPP_HOST_DEVICE_H_
#define TESTS_CPP_HOST_DEVICE_H_

#include <chrono>
#include <memory>
#include <string_view>

#include "xla_plugin/device/device.h"

namespace jaxhet::testing {

// One device, "host", whose memory is the host's and whose streams are threads.
const Vendor& HostVendor();
// VendorOf(), which also knows "host".
const Vendor& TestVendorOf(std::string_view name);
std::unique_ptr<Device> OpenHostDevice();
// Calls of this thread so far, of all host devices.
uint64_t HostDeviceCalls();

// While it lives, streams are called idle so much after their last work, as by a driver, which
// retires work after its effects are seen.
class LateRetirement {
 public:
  explicit LateRetirement(std::chrono::milliseconds delay);
  ~LateRetirement();
  LateRetirement(const LateRetirement&) = delete;
  LateRetirement& operator=(const LateRetirement&) = delete;
};

// While it lives, what a device is to fill stays in a cache of its own until a host waits for the
// stream.
class CachedFills {
 public:
  CachedFills();
  ~CachedFills();
  CachedFills(const CachedFills&) = delete;
  CachedFills& operator=(const CachedFills&) = delete;
};

// While it lives, devices read the mapped memory of peers by system calls, as memory that is not
// shared.
class KernelReads {
 public:
  KernelReads();
  ~KernelReads();
  KernelReads(const KernelReads&) = delete;
  KernelReads& operator=(const KernelReads&) = delete;
};

}  // namespace jaxhet::testing

#endif  // TESTS_CPP_HOST_DEVICE_H_
