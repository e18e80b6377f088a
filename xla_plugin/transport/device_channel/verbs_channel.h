#ifndef XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_VERBS_CHANNEL_H_
#define XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_VERBS_CHANNEL_H_

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "xla_plugin/transport/device_channel/device_channel.h"

namespace jaxhet {

// verbs: any two devices with RDMA NICs. Each end has slots of its own that NICs reach, in its
// device's memory if that was proven, and in pinned host memory if not; a lane carries filled slots
// from the source's to the target's. To its device each end is a channel like the others.
std::pair<std::unique_ptr<DeviceChannel>, std::string> MakeVerbsChannel(const ChannelSetup& setup);
std::unique_ptr<DeviceChannel> OpenVerbsChannel(const ChannelSetup& setup, std::string_view offer);

}  // namespace jaxhet

#endif  // XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_VERBS_CHANNEL_H_
