#ifndef XLA_PLUGIN_NET_POLLABLE_H_
#define XLA_PLUGIN_NET_POLLABLE_H_

#include <cstdint>

namespace jaxhet {

// A file descriptor that the engine polls, edge-triggered. All calls come from the thread that owns
// the engine at the moment.
class Pollable {
 public:
  virtual int fd() const = 0;
  // Takes note of an epoll or poll event; does not throw.
  virtual void OnEvents(uint32_t events) = 0;

 protected:
  ~Pollable() = default;
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_NET_POLLABLE_H_
