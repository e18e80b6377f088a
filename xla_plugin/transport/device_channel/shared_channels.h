#ifndef XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_SHARED_CHANNELS_H_
#define XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_SHARED_CHANNELS_H_

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "xla_plugin/transport/device_channel/device_channel.h"

// Channels within one host; see DeviceTransport.
namespace jaxhet {

using MadeChannel = std::pair<std::unique_ptr<DeviceChannel>, std::string>;

// local: two devices of one process; the slots are the target device's memory.
MadeChannel MakeLocalChannel(const ChannelSetup& setup);
std::unique_ptr<DeviceChannel> OpenLocalChannel(const ChannelSetup& setup, std::string_view offer);

// cuda_ipc, hip_ipc: devices of one vendor in two processes; the slots are the target device's
// memory, mapped into the source's process.
MadeChannel MakeCudaIpcChannel(const ChannelSetup& setup);
MadeChannel MakeHipIpcChannel(const ChannelSetup& setup);
std::unique_ptr<DeviceChannel> OpenIpcChannel(const ChannelSetup& setup, std::string_view offer);

// host: any two devices; the slots are host memory that both see.
MadeChannel MakeHostChannel(const ChannelSetup& setup);
std::unique_ptr<DeviceChannel> OpenHostChannel(const ChannelSetup& setup, std::string_view offer);

}  // namespace jaxhet

#endif  // XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_SHARED_CHANNELS_H_
