#include "xla_plugin/transport/ring/shared_rings.h"

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"
#include "xla_plugin/transport/ring/shared_words.h"

namespace jaxhet {
namespace {

size_t SlotsBytes(size_t slot_bytes) { return CheckedMultiply(kRingSlots, slot_bytes); }

// The slots are memory of the target's device.
class DeviceRing final : public SharedWordsRing {
 public:
  DeviceRing(Device& device, size_t slot_bytes)
      : SharedWordsRing(device, 0), memory_(device.Allocate(SlotsBytes(slot_bytes))) {
    SetSlots(memory_.get(), slot_bytes);
  }

  SharedRingInfo Info() const {
    return {.memory = memory_info(),
            .slot_bytes = slot_bytes(),
            .slots_handle = {},
            .slots_offset = reinterpret_cast<uintptr_t>(memory_.get())};
  }
  SharedRingInfo IpcInfo(Device& device) const {
    SharedRingInfo info = Info();
    info.slots_handle = device.ExportIpc(memory_.get());
    const auto* const base = static_cast<const std::byte*>(device.RangeOf(memory_.get()).base);
    info.slots_offset = static_cast<uint64_t>(static_cast<std::byte*>(memory_.get()) - base);
    return info;
  }

 private:
  DeviceMemory memory_;
};

class LocalRingSource final : public SharedWordsRing {
 public:
  LocalRingSource(Device& device, const SharedRingInfo& info)
      : SharedWordsRing(device, info.memory, 0) {
    SetSlots(reinterpret_cast<void*>(info.slots_offset), info.slot_bytes);
  }
};

class IpcRingSource final : public SharedWordsRing {
 public:
  IpcRingSource(Device& device, const SharedRingInfo& info)
      : SharedWordsRing(device, info.memory, 0), memory_(device.OpenIpc(info.slots_handle)) {
    SetSlots(static_cast<std::byte*>(memory_.get()) + info.slots_offset, info.slot_bytes);
  }

 private:
  IpcMemory memory_;
};

class ShmRing final : public SharedWordsRing {
 public:
  ShmRing(Device& device, size_t slot_bytes) : SharedWordsRing(device, SlotsBytes(slot_bytes)) {
    SetSlots(extra(), slot_bytes);
  }
  ShmRing(Device& device, const SharedRingInfo& info)
      : SharedWordsRing(device, info.memory, SlotsBytes(info.slot_bytes)) {
    SetSlots(extra(), info.slot_bytes);
  }

  SharedRingInfo Info() const {
    return {
        .memory = memory_info(), .slot_bytes = slot_bytes(), .slots_handle = {}, .slots_offset = 0};
  }
};

MadeRing MakeIpcRing(const RingSetup& setup, std::string_view vendor) {
  if (setup.same_process) Throw(ErrorCode::kTransport, "both devices are of one process");
  if (!setup.same_host) Throw(ErrorCode::kTransport, "the devices are on different hosts");
  if (setup.device.info().vendor != vendor || !setup.same_vendor) {
    Throw(ErrorCode::kTransport, "the devices are not both of vendor ", vendor);
  }
  auto ring = std::make_unique<DeviceRing>(setup.device, setup.slot_bytes);
  std::string offer = ToOffer(ring->IpcInfo(setup.device));
  return {std::move(ring), std::move(offer)};
}

}  // namespace

MadeRing MakeLocalRing(const RingSetup& setup) {
  if (!setup.same_process) Throw(ErrorCode::kTransport, "the devices are of two processes");
  auto ring = std::make_unique<DeviceRing>(setup.device, setup.slot_bytes);
  std::string offer = ToOffer(ring->Info());
  return {std::move(ring), std::move(offer)};
}

std::unique_ptr<RingEnd> OpenLocalRing(const RingSetup& setup, std::string_view offer) {
  return std::make_unique<LocalRingSource>(setup.device, ParseSharedRingInfo(offer));
}

MadeRing MakeCudaIpcRing(const RingSetup& setup) { return MakeIpcRing(setup, "cuda"); }
MadeRing MakeHipIpcRing(const RingSetup& setup) { return MakeIpcRing(setup, "hip"); }

std::unique_ptr<RingEnd> OpenIpcRing(const RingSetup& setup, std::string_view offer) {
  return std::make_unique<IpcRingSource>(setup.device, ParseSharedRingInfo(offer));
}

MadeRing MakeShmRing(const RingSetup& setup) {
  if (!setup.same_host) Throw(ErrorCode::kTransport, "the devices are on different hosts");
  auto ring = std::make_unique<ShmRing>(setup.device, setup.slot_bytes);
  std::string offer = ToOffer(ring->Info());
  return {std::move(ring), std::move(offer)};
}

std::unique_ptr<RingEnd> OpenShmRingEnd(const RingSetup& setup, std::string_view offer) {
  return std::make_unique<ShmRing>(setup.device, ParseSharedRingInfo(offer));
}

}  // namespace jaxhet
