#ifndef XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_SOCKET_CHANNEL_H_
#define XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_SOCKET_CHANNEL_H_

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "xla_plugin/transport/device_channel/device_channel.h"

namespace jaxhet {

// socket: any two devices. Each end has slots and words of its own, in host memory; lanes, in
// turns, carry filled slots from the source's to the target's. To its device each end is a channel
// like the others.
std::pair<std::unique_ptr<DeviceChannel>, std::string> MakeSocketChannel(const ChannelSetup& setup);
std::unique_ptr<DeviceChannel> OpenSocketChannel(const ChannelSetup& setup, std::string_view offer);

}  // namespace jaxhet

#endif  // XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_SOCKET_CHANNEL_H_
