#include "xla_plugin/transport/verbs/device_slots.h"

#include <array>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"

namespace jaxhet::verbs {

DeviceSlots::DeviceSlots(Device& device, NicMemory::NicList nics, const Options& options,
                         size_t num_slots, size_t slot_bytes) {
  const size_t num_bytes = CheckedMultiply(num_slots, slot_bytes);
  try {
    device_memory_ = device.Allocate(num_bytes);
    device_address_ = device_memory_.get();
    const std::span memory(static_cast<std::byte*>(device_address_), num_bytes);
    constexpr size_t kProofBytes = Loopback::kMostBytes;
    const std::array places = {memory.first(kProofBytes),
                               memory.subspan(num_bytes / 2, kProofBytes),
                               memory.last(kProofBytes)};
    device_region_.emplace(device, nics, options, memory, places, DeviceRegion::Use::kReadAndWrite);
    slots_ = {&*device_region_, memory.data(), slot_bytes};
    way_ = device_region_->way();
    return;
  } catch (const Error& error) {
    way_ = StrCat("pinned memory (", error.text(), ")");
  }
  device_memory_ = {};
  pinned_memory_ = device.AllocatePinned(num_bytes);
  device_address_ = device.DeviceAddress(pinned_memory_.get());
  const std::span pinned(static_cast<std::byte*>(pinned_memory_.get()), num_bytes);
  pinned_region_.emplace(nics, pinned, ibv::kAccessLocalWrite | ibv::kAccessRemoteWrite);
  slots_ = {&*pinned_region_, pinned.data(), slot_bytes};
}

void DeviceSlots::Flush(size_t slot, size_t nic) {
  if (device_region_) device_region_->Flush(slots_.address(slot), nic);
}

}  // namespace jaxhet::verbs
