#ifndef TESTS_CPP_HOST_DEVICE_H_
#define TESTS_CPP_HOST_DEVICE_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "xla_plugin/device/device.h"

namespace jaxhet::testing {

// Work of a stream: `run` is false if it can't be done yet; a write of `word` may change that.
struct StreamWork {
  std::function<bool()> run;
  uint32_t* word = nullptr;
};

// A stream's work, in order. The destructor drops what can't be done yet, and the work behind it.
class StreamQueue {
 public:
  StreamQueue() = default;
  virtual ~StreamQueue() = default;
  StreamQueue(const StreamQueue&) = delete;
  StreamQueue& operator=(const StreamQueue&) = delete;

  virtual void Add(std::vector<StreamWork> work) = 0;
  virtual bool IsIdle() = 0;
  virtual void Synchronize() = 0;
};

// One device, "host", whose memory is the host's and whose streams are threads.
const Vendor& HostVendor();
// VendorOf(), which also knows "host".
const Vendor& TestVendorOf(std::string_view name);
std::unique_ptr<Device> OpenHostDevice();
// One whose streams have the queues that `make_queue` gives, in the order of their creation.
std::unique_ptr<Device> OpenHostDevice(std::function<std::unique_ptr<StreamQueue>()> make_queue);
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

}  // namespace jaxhet::testing

#endif  // TESTS_CPP_HOST_DEVICE_H_
