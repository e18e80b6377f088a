#ifndef XLA_PLUGIN_NET_SOCKET_MESSAGE_SOCKET_H_
#define XLA_PLUGIN_NET_SOCKET_MESSAGE_SOCKET_H_

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "xla_plugin/net/socket/socket.h"

namespace jaxhet {

// Short messages over a connection. For one thread.
class MessageSocket {
 public:
  explicit MessageSocket(Fd fd, SealKeys keys = {}) : socket_(std::move(fd), std::move(keys)) {}

  Socket& socket() { return socket_; }
  const Socket& socket() const { return socket_; }
  // Later calls of either function send the rest if the kernel does not take all of it.
  void Send(std::span<const iovec> message);
  // The next message, if it has arrived. Throws if the peer has closed the connection.
  std::optional<std::string> Receive();

 private:
  void SendRest();

  Socket socket_;
  std::string unsent_;
  std::string received_;
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_NET_SOCKET_MESSAGE_SOCKET_H_
