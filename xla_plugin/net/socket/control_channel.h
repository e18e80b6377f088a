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

// Messages on a control connection: a MessageInfo, then a body that starts with the type's own
// structure. Fixed width, little-endian; kMessageMagic names the version.
namespace jaxhet {

static_assert(std::endian::native == std::endian::little);

inline constexpr uint32_t kMessageMagic = 0x3348'584a;  // "JXH3"
inline constexpr uint64_t kMaxBodyBytes = uint64_t{64} << 20;

enum class MessageType : uint32_t {
  kHello,  // HelloInfo, then a table of strings: (transport, "ok" or "refused", offer or reason)
  kHelloReply,  // the same table, in answer to the peer's hello; the offers are empty
  kPlan,        // PlanInfo, the plan's text, then its program; before the first start of that plan
  kStart,       // StartInfo, then the bytes themselves (eager) or the transport's announcement
  kTransport,   // for the peer's Connection::OnMessage
  kHeartbeat,   // nothing
  kFail,        // FailInfo, then the text
  kGoodbye,     // nothing; no start follows
  kDeviceChannel,  // the structure and the table of strings of channel_setup.cc
};
inline constexpr MessageType kLastMessageType = MessageType::kDeviceChannel;

struct MessageInfo {
  uint32_t magic;
  MessageType type;
  uint64_t body_bytes;
};

struct Message {
  MessageType type;
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

#endif  // XLA_PLUGIN_NET_SOCKET_CONTROL_CHANNEL_H_
