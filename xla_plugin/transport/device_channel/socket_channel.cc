#include <memory>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"
#include "xla_plugin/transport/device_channel/device_channel.h"
#include "xla_plugin/transport/device_channel/lane_channel.h"

namespace jaxhet {
namespace {

// Offers of all lanes, each after its length.
std::string OffersOf(std::span<const std::shared_ptr<Lane>> lanes) {
  std::string offers;
  for (const auto& lane : lanes) {
    const std::string offer = lane->connection().Offer();
    offers += static_cast<char>(offer.size());
    offers += offer;
  }
  return offers;
}
void AcceptOffers(std::span<const std::shared_ptr<Lane>> lanes, std::string_view offers) {
  for (const auto& lane : lanes) {
    const size_t num_bytes = Take<uint8_t>(offers, "the peer's offer");
    if (num_bytes > offers.size()) Throw(ErrorCode::kTransport, "the peer's offer is cut");
    lane->Accept(offers.substr(0, num_bytes));
    offers.remove_prefix(num_bytes);
  }
}

class SocketChannel final : public LaneChannel {
 public:
  SocketChannel(const ChannelSetup& setup, End end, size_t slot_bytes)
      : LaneChannel(setup, end, {setup.lanes.begin(), setup.lanes.end()}) {
    if (setup.piece != nullptr) {
      SetSlots(setup.piece->slots, setup.piece->slots_on_device, slot_bytes);
      return;
    }
    slots_memory_ = setup.device.AllocatePinned(CheckedMultiply(kChannelSlots, slot_bytes));
    void* const slots = slots_memory_.get();
    SetSlots(static_cast<std::byte*>(slots), setup.device.DeviceAddress(slots), slot_bytes);
  }
  // Lanes must not move anything to memory that is gone.
  ~SocketChannel() override { Cut(); }

  std::string Answer() override { return OffersOf(lanes()); }
  void Accept(std::string_view answer) override { AcceptOffers(lanes(), answer); }
  // The sockets were authenticated; there is no memory to prove.
  void Prove(Device& /*device*/, std::span<const std::byte> /*proof*/) override {}
  bool IsProven(Device& /*device*/, std::span<const std::byte> /*proof*/) override { return true; }

  static size_t SlotBytes(const ChannelSetup& setup) {
    if (setup.same_process) Throw(ErrorCode::kTransport, "both devices are of one process");
    if (setup.lanes.empty()) Throw(ErrorCode::kTransport, "no sockets were connected for it");
    return HostSlotBytes(setup);
  }

 private:
  PinnedMemory slots_memory_;  // null: in a piece
};

}  // namespace

// Any two devices. Each end has slots and words of its own, in host memory; lanes, in turns, carry
// filled slots from the source's to the target's. To its device each end is a channel like the
// others.
const DeviceTransport socket_transport = {.name = "socket",
                                          .make = &MakeLaneChannel<SocketChannel>,
                                          .open = &OpenLaneChannel<SocketChannel>};

}  // namespace jaxhet
