#ifndef XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_PROXY_H_
#define XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_PROXY_H_

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "xla_plugin/base/fd.h"
#include "xla_plugin/net/pollable.h"

namespace jaxhet {

class ProxyThread;

// Work that a proxy thread does for a channel.
class ProxyTask {
 public:
  enum class State {
    kIdle,     // there is nothing to do before an event of a pollable, or Wake()
    kWaiting,  // a device, or a NIC that is polled, comes first
    kMoved,
  };

  virtual ~ProxyTask() = default;
  // Returns the same ones each time.
  virtual std::vector<Pollable*> Pollables() = 0;
  // Only the proxy's thread calls it, and handles events of the pollables. Does not block or throw.
  virtual State Advance() = 0;
  // Says that the task may have something to do. Any thread may call it.
  void Wake();

 private:
  friend class Proxy;
  friend class ProxyThread;

  std::atomic<bool> is_due_ = true;
  std::atomic<ProxyThread*> thread_ = nullptr;
};

// The threads that drive all channels of a rank which devices can't drive alone.
class Proxy {
 public:
  static constexpr size_t kMostThreads = 8;

  Proxy();
  // Ends the threads. Tasks live longer.
  ~Proxy();
  Proxy(const Proxy&) = delete;
  Proxy& operator=(const Proxy&) = delete;

  // Gives the task to the next of the threads, in turns; starts one more thread if there are fewer
  // than `wanted_threads`. A task that was added before stays where it is. Any thread may call it.
  void Add(ProxyTask& task, size_t wanted_threads);

 private:
  std::mutex mutex_;  // guards the members below
  Fd ready_;          // an eventfd that is always ready, to wake threads; none before the first
  std::vector<std::unique_ptr<ProxyThread>> threads_;
  size_t num_tasks_ = 0;
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_PROXY_H_
