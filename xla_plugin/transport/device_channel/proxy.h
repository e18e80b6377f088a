#ifndef XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_PROXY_H_
#define XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_PROXY_H_

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "xla_plugin/base/fd.h"

namespace jaxhet {

class Lane;
class ProxyThread;

// The threads that drive all channels of a rank which devices can't drive alone.
class Proxy {
 public:
  static constexpr size_t kMostThreads = 8;

  Proxy();
  // Ends the threads. Lanes live longer.
  ~Proxy();
  Proxy(const Proxy&) = delete;
  Proxy& operator=(const Proxy&) = delete;

  // Gives the lane to the next of the threads, in turns; starts one more thread if there are fewer
  // than `wanted_threads`. A lane that was added before stays where it is. Any thread may call it.
  void Add(Lane& lane, size_t wanted_threads);

 private:
  std::mutex mutex_;  // guards the members below
  Fd ready_;          // an eventfd that is always ready, to wake threads; none before the first
  std::vector<std::unique_ptr<ProxyThread>> threads_;
  size_t num_lanes_ = 0;
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_PROXY_H_
