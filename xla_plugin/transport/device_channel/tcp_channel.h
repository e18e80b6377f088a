#ifndef XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_TCP_CHANNEL_H_
#define XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_TCP_CHANNEL_H_

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "xla_plugin/net/socket/message_socket.h"
#include "xla_plugin/net/socket/tcp_connection.h"
#include "xla_plugin/transport/device_channel/device_channel.h"
#include "xla_plugin/transport/device_channel/proxy.h"

namespace jaxhet {

struct LaneSockets {
  Fd messages;  // takes the place of the control connection
  SealKeys messages_keys;
  std::vector<Fd> data;
  std::vector<SealKeys> keys;  // one for each of `data`
  std::chrono::milliseconds path_timeout;
  std::function<void(std::string_view what)> log;  // for people; by any thread
};

// Some of the sockets between two ranks, for the channels of both directions: a Connection that a
// proxy drives.
class SocketLane final : public ProxyTask, private ConnectionHost {
 public:
  // One channel's work; each transfer of it is a chunk. The lane's errors end both directions.
  class Direction {
   public:
    virtual ~Direction() = default;
    // Begins the transfers of chunks that a device has written.
    virtual State Begin([[maybe_unused]] Connection& connection) { return State::kIdle; }
    // By the target: whether the slot of that chunk is empty; and the chunk's transfer.
    virtual bool IsReady([[maybe_unused]] uint64_t chunk) { return false; }
    virtual Transfer& Find(uint64_t chunk);
    // More of the transfer was sent or received.
    virtual void Moved(Transfer& transfer) = 0;
    // A chunk was launched and is not sent.
    virtual bool is_sending() const { return false; }
    virtual void Fail(const Error& error) = 0;
  };

  static constexpr size_t kMost = 4;  // lanes between two ranks: one for each proxy thread

  explicit SocketLane(LaneSockets sockets);

  std::vector<int> fds();
  std::string Offer() { return connection_.Offer(); }
  // Throws for the offer of another version.
  void Accept(std::string_view offer);
  std::vector<Pollable*> Pollables() override;
  State Advance() override;

  void SetOutgoing(Direction& direction);
  void SetIncoming(Direction& direction);
  // Nothing is moved any more, in either direction.
  void Stop();

 private:
  void Send(std::span<const iovec> message) override {
    if (messages_) messages_->Send(message);
  }
  void Log(std::string_view what) override { log_(what); }
  void Lost(std::string_view why) override { lost_ = why; }
  Transfer& Find(uint64_t ticket) override { return incoming_->Find(ticket); }
  bool IsReady(uint64_t ticket) override;
  void Sent(Transfer& transfer, size_t num_bytes) override;
  void Received(Transfer& transfer, size_t num_bytes) override;

  const std::function<void(std::string_view)> log_;
  std::optional<MessageSocket> messages_;  // none: they have a single path
  tcp::TcpConnection connection_;
  std::mutex mutex_;
  bool is_over_ = false;           // under mutex_, like the rest
  Direction* outgoing_ = nullptr;  // null: not settled, or by another transport
  Direction* incoming_ = nullptr;
  std::string lost_;  // why the connection can't go on
  bool has_moved_ = false;
  bool is_stalled_ = false;  // a chunk waits for its slot
};

// socket: any two devices. Each end has slots and words of its own, in host memory; lanes, in
// turns, carry filled slots from the source's to the target's. To its device each end is a channel
// like the others.
std::pair<std::unique_ptr<DeviceChannel>, std::string> MakeTcpChannel(const ChannelSetup& setup);
std::unique_ptr<DeviceChannel> OpenTcpChannel(const ChannelSetup& setup, std::string_view offer);

}  // namespace jaxhet

#endif  // XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_TCP_CHANNEL_H_
