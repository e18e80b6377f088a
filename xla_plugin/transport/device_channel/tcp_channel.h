#ifndef XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_TCP_CHANNEL_H_
#define XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_TCP_CHANNEL_H_

#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "xla_plugin/transport/device_channel/device_channel.h"
#include "xla_plugin/transport/device_channel/proxy.h"
#include "xla_plugin/transport/socket.h"

namespace jaxhet {

// A socket between two ranks, for the channels of both directions.
class SocketLane final : public ProxyTask {
 public:
  // One channel's work. Advance() may throw, which ends it, and Fail() says why.
  class Direction {
   public:
    virtual ~Direction() = default;
    virtual State Advance(Socket& socket) = 0;
    virtual void Fail(const Error& error) = 0;
  };

  SocketLane(Fd fd, SealKeys keys) : socket_(std::move(fd), std::move(keys)) {}

  int fd() const { return socket_.fd(); }
  std::vector<Pollable*> Pollables() override { return {&socket_}; }
  State Advance() override;

  void Attach(Direction& direction);
  // Nothing is moved for it any more.
  void Detach(Direction& direction);

 private:
  Socket socket_;  // the proxy's
  std::mutex mutex_;
  std::vector<Direction*> directions_;  // under mutex_
};

// tcp: any two devices. Each end has slots and words of its own, in host memory; lanes, in turns,
// carry filled slots from the source's to the target's. To its device each end is a channel like
// the others.
std::pair<std::unique_ptr<DeviceChannel>, std::string> MakeTcpChannel(const ChannelSetup& setup);
std::unique_ptr<DeviceChannel> OpenTcpChannel(const ChannelSetup& setup, std::string_view offer);

}  // namespace jaxhet

#endif  // XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_TCP_CHANNEL_H_
