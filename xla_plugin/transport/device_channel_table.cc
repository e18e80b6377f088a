#include <array>

#include "xla_plugin/transport/device_channel/shared_channels.h"
#include "xla_plugin/transport/device_channel/socket_channel.h"
#include "xla_plugin/transport/device_channel/verbs_channel.h"

namespace jaxhet {
namespace {

constexpr std::array kTransports = {
    DeviceTransport{.name = "local", .make = MakeLocalChannel, .open = OpenLocalChannel},
    DeviceTransport{.name = "cuda_ipc", .make = MakeCudaIpcChannel, .open = OpenIpcChannel},
    DeviceTransport{.name = "hip_ipc", .make = MakeHipIpcChannel, .open = OpenIpcChannel},
    DeviceTransport{.name = "host", .make = MakeHostChannel, .open = OpenHostChannel},
    DeviceTransport{.name = "verbs", .make = MakeVerbsChannel, .open = OpenVerbsChannel},
    DeviceTransport{.name = "socket", .make = MakeSocketChannel, .open = OpenSocketChannel},
};

}  // namespace

std::span<const DeviceTransport> DeviceTransports() { return kTransports; }

}  // namespace jaxhet
