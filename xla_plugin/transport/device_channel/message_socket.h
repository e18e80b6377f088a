#ifndef XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_MESSAGE_SOCKET_H_
#define XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_MESSAGE_SOCKET_H_

#include <cstddef>
#include <optional>
#include <span>
#include <string>

#include "xla_plugin/base/fd.h"
#include "xla_plugin/base/io_list.h"

namespace jaxhet {

// Messages over a connection, few and short. For one thread, but for Shutdown().
class MessageSocket {
 public:
  // Uses a connection that another object owns as well.
  explicit MessageSocket(const Fd& socket);

  int fd() const { return fd_.get(); }
  // Blocks while the peer does not read.
  void Send(std::span<const iovec> message) const;
  // The next message, if it has arrived. Throws if the peer has closed the connection.
  std::optional<std::string> Receive();
  // By any thread: the connection is at its end.
  void Shutdown() const;

 private:
  Fd fd_;
  std::string received_;
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_MESSAGE_SOCKET_H_
