#ifndef XLA_PLUGIN_NET_SOCKET_CONTROL_CHANNEL_H_
#define XLA_PLUGIN_NET_SOCKET_CONTROL_CHANNEL_H_

#include <bit>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "xla_plugin/base/fd.h"
#include "xla_plugin/base/io_list.h"
#include "xla_plugin/net/socket/socket.h"

// Messages on a connection: a MessageInfo, then a body. Fixed width, little-endian; kMessageMagic
// names the version.
namespace jaxhet {

static_assert(std::endian::native == std::endian::little);

inline constexpr uint32_t kMessageMagic = 0x3348'584a;  // "JXH3"
inline constexpr uint64_t kMaxBodyBytes = uint64_t{64} << 20;

struct MessageInfo {
  uint32_t magic;
  uint32_t type;  // number that has a meaning for the owner
  uint64_t body_bytes;
};

struct Message {
  uint32_t type;
  std::string_view body;  // until the next call of Next()
};

// Whole messages over the control connection to one peer, or over a lane's. Without a socket it is
// the process's connection to itself: what is sent is received. Never blocks; what can't be sent is
// kept.
class ControlChannel {
 public:
  ControlChannel() = default;  // to ourselves
  explicit ControlChannel(Fd fd, SealKeys keys = {})
      : socket_(std::in_place, std::move(fd), std::move(keys)) {}

  void Send(uint32_t type, std::span<const iovec> body);
  void Send(uint32_t type, std::string_view body = {});
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

#endif  // XLA_PLUGIN_NET_SOCKET_CONTROL_CHANNEL_H_
