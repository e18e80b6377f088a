#ifndef XLA_PLUGIN_ENGINE_CONTROL_CONTROL_CHANNEL_H_
#define XLA_PLUGIN_ENGINE_CONTROL_CONTROL_CHANNEL_H_

#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "xla_plugin/base/fd.h"
#include "xla_plugin/base/io_list.h"
#include "xla_plugin/engine/common/wire.h"
#include "xla_plugin/net/socket/socket.h"

namespace jaxhet {

struct Message {
  MessageType type;
  std::string_view body;  // until the next call of Next()
};

// Whole messages over the control connection to one peer. Without a socket it is the process's
// connection to itself: what is sent is received. Never blocks; what can't be sent is kept.
class ControlChannel {
 public:
  ControlChannel() = default;  // to ourselves
  explicit ControlChannel(Fd fd, SealKeys keys = {})
      : socket_(std::in_place, std::move(fd), std::move(keys)) {}

  void Send(MessageType type, std::span<const iovec> body);
  void Send(MessageType type, std::string_view body = {});
  // Sends what was kept.
  void Flush();
  // Says that nothing follows, after what was kept; later messages are dropped.
  void FinishSending();

  // The next message, if it has arrived. Throws TransportError for other bytes.
  std::optional<Message> Next();

  Socket* socket() { return socket_ ? &*socket_ : nullptr; }
  bool closed() const { return socket_ && socket_->closed(); }

 private:
  std::optional<Message> Parse();
  bool ReadMore();

  std::optional<Socket> socket_;
  std::string unsent_;
  std::string received_;
  size_t parsed_ = 0;  // bytes of received_ that Next() has given out
  bool finished_ = false;
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_ENGINE_CONTROL_CONTROL_CHANNEL_H_
