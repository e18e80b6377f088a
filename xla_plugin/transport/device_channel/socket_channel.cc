#include "xla_plugin/base/error.h"
#include "xla_plugin/transport/device_channel/device_channel.h"
#include "xla_plugin/transport/device_channel/lane_channel.h"

namespace jaxhet {
namespace {

class SocketChannel final : public LaneChannel {
 public:
  using LaneChannel::LaneChannel;

  // Sockets were authenticated; there is no memory to prove.
  void Prove(Device& /*device*/, std::span<const std::byte> /*proof*/) override {}
  bool IsProven(Device& /*device*/, std::span<const std::byte> /*proof*/) override { return true; }

  static size_t SlotBytes(const ChannelSetup& setup) {
    if (setup.same_process) Throw(ErrorCode::kTransport, "both devices are of one process");
    if (setup.lanes.empty()) Throw(ErrorCode::kTransport, "no sockets were connected for it");
    return HostSlotBytes(setup);
  }
};

}  // namespace

// Any two devices. Lanes carry filled slots from the source's to the target's.
const DeviceTransport socket_transport = {.name = "socket",
                                          .make = &MakeLaneChannel<SocketChannel>,
                                          .open = &OpenLaneChannel<SocketChannel>};

}  // namespace jaxhet
