#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"
#include "xla_plugin/net/verbs/memory.h"
#include "xla_plugin/net/verbs/nics.h"
#include "xla_plugin/net/verbs/verbs_connection.h"
#include "xla_plugin/transport/device_channel/device_channel.h"
#include "xla_plugin/transport/device_channel/lane_channel.h"

namespace jaxhet {
namespace {

static_assert(sizeof(DeviceChunkInfo) == sizeof(verbs::ChunkInfo::description));

using Nics = std::vector<std::shared_ptr<verbs::Nic>>;

class VerbsChannel final : public LaneChannel {
 public:
  VerbsChannel(const ChannelSetup& setup, End end, size_t slot_bytes)
      : VerbsChannel(setup, end, slot_bytes, NicsOf(setup)) {}

  void Prove(Device& device, std::span<const std::byte> proof) override {
    if (pinned_slots_ != nullptr) {
      std::ranges::copy(proof, pinned_slots_);
    } else {
      DeviceChannel::Prove(device, proof);
    }
    connection().SendProof(proof.size());
  }
  bool IsProven(Device& device, std::span<const std::byte> proof) override {
    if (!connection().AwaitProof()) return false;
    const bool is_proven = pinned_slots_ != nullptr
                               ? std::ranges::equal(proof, std::span(pinned_slots_, proof.size()))
                               : DeviceChannel::IsProven(device, proof);
    connection().TakeProof();
    return is_proven;
  }
  std::string Remark() const override {
    if (device_slots_->why_pinned().empty()) return {};
    return StrCat("RDMA goes through pinned memory (", device_slots_->why_pinned(), ")");
  }

  static size_t SlotBytes(const ChannelSetup& setup) {
    RefuseSealing(setup.encryption);
    if (setup.same_process) Throw(ErrorCode::kTransport, "both devices are of one process");
    return std::min(setup.slot_bytes, verbs::kMostMessageBytes);
  }

 private:
  using Slots = std::shared_ptr<verbs::DeviceSlots>;

  VerbsChannel(const ChannelSetup& setup, End end, size_t slot_bytes, const Nics& nics)
      : VerbsChannel(setup, end, MakeSlots(setup, nics, slot_bytes), nics) {}
  VerbsChannel(const ChannelSetup& setup, End end, const Slots& slots, const Nics& nics)
      : LaneChannel(setup, end, {MakeLane(setup, end, slots, nics)}, 0),
        device_slots_(slots),
        pinned_slots_(setup.piece == nullptr ? nullptr : setup.piece->slots) {
    SetSlots(slots->slots().first, slots->device_address(), slots->slots().slot_bytes);
  }

  static Nics NicsOf(const ChannelSetup& setup) {
    if (setup.piece == nullptr) return setup.nics->Near(setup.device.info().pci_bus_id);
    if (setup.piece->nics.empty()) Throw(ErrorCode::kTransport, "no NIC was ready at the start");
    return {setup.piece->nics.begin(), setup.piece->nics.end()};
  }

  static Slots MakeSlots(const ChannelSetup& setup, const Nics& nics, size_t slot_bytes) {
    if (setup.piece == nullptr) {
      return std::make_shared<verbs::DeviceSlots>(setup.device, nics, setup.nics->options(),
                                                  kChannelSlots, slot_bytes);
    }
    const verbs::SlotMemory slots{setup.piece->nic_memory, setup.piece->slots, slot_bytes};
    return std::make_shared<verbs::DeviceSlots>(setup.device, slots, setup.piece->slots_on_device);
  }

  static std::shared_ptr<Lane> MakeLane(const ChannelSetup& setup, End end, const Slots& slots,
                                        const Nics& nics) {
    using Direction = verbs::VerbsConnection::Direction;
    return std::make_shared<Lane>(std::nullopt, nullptr, [&](ConnectionHost& host) {
      return std::make_unique<verbs::VerbsConnection>(
          nics, setup.nics->options(), slots, kChannelSlots,
          end == End::kSource ? Direction::kOut : Direction::kIn, host);
    });
  }

  verbs::VerbsConnection& connection() {
    return static_cast<verbs::VerbsConnection&>(lanes().front()->connection());
  }

  Slots device_slots_;
  std::byte* pinned_slots_;  // slots of a piece, for the host; else null
};

}  // namespace

// Any two devices with RDMA NICs. Each end has slots of its own that NICs reach, in its
// device's memory if that was proven, and in pinned host memory if not; a lane carries filled slots
// from the source's to the target's.
const DeviceTransport verbs_transport = {.name = "verbs",
                                         .make = &MakeLaneChannel<VerbsChannel>,
                                         .open = &OpenLaneChannel<VerbsChannel>};

}  // namespace jaxhet
