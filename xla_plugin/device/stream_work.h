#ifndef XLA_PLUGIN_DEVICE_STREAM_WORK_H_
#define XLA_PLUGIN_DEVICE_STREAM_WORK_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "xla_plugin/device/device.h"

namespace jaxhet {

// Work for a stream, which writes and waits for values in as few calls as it can. Flush() at the
// end.
class StreamWork {
 public:
  StreamWork(Device& device, StreamHandle stream) : device_(device), stream_(stream) {}

  StreamHandle stream() const { return stream_; }
  void Write(void* address, uint32_t value) {
    values_.push_back({StreamValue::Kind::kWrite, address, value});
  }
  // A write may be invisible until the call that holds it is over: the same call must not wait for
  // it, not even by way of a peer.
  void Wait(void* address, uint32_t value) {
    if (!values_.empty() && values_.back().kind == StreamValue::Kind::kWrite) Flush();
    values_.push_back({StreamValue::Kind::kWait, address, value});
  }
  void WaitEvent(EventHandle event) {
    Flush();
    device_.WaitEvent(stream_, event);
  }
  void Copy(void* to, const void* from, size_t num_bytes) {
    Flush();
    device_.Copy(stream_, to, from, num_bytes);
  }
  void Flush() {
    if (!values_.empty()) device_.Values(stream_, values_);
    values_.clear();
  }

 private:
  Device& device_;
  StreamHandle stream_;
  std::vector<StreamValue> values_;
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_DEVICE_STREAM_WORK_H_
