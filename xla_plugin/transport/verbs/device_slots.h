#ifndef XLA_PLUGIN_TRANSPORT_VERBS_DEVICE_SLOTS_H_
#define XLA_PLUGIN_TRANSPORT_VERBS_DEVICE_SLOTS_H_

#include <cstddef>
#include <optional>
#include <string>

#include "xla_plugin/device/device.h"
#include "xla_plugin/transport/verbs/device_region.h"
#include "xla_plugin/transport/verbs/slot_memory.h"

namespace jaxhet::verbs {

// Slots that a device and NICs share: in memory of the device, or in pinned memory of the host if
// NICs can't reach that.
class DeviceSlots {
 public:
  DeviceSlots(Device& device, NicMemory::NicList nics, const Options& options, size_t num_slots,
              size_t slot_bytes);

  SlotMemory slots() const { return slots_; }
  // Address of the first slot on the device.
  void* device_address() const { return device_address_; }
  // "dma-buf", "peer memory" or "pinned memory (dma-buf: ...; peer memory: ...)".
  const std::string& way() const { return way_; }
  bool is_pinned() const { return pinned_region_.has_value(); }
  // After NIC `nic` has written to the slot: lets the device see it, or throws TransportError.
  void Flush(size_t slot, size_t nic);

 private:
  DeviceMemory device_memory_;
  PinnedMemory pinned_memory_;
  std::optional<DeviceRegion> device_region_;  // one of the two
  std::optional<HostRegion> pinned_region_;
  SlotMemory slots_{};
  void* device_address_ = nullptr;
  std::string way_;
};

}  // namespace jaxhet::verbs

#endif  // XLA_PLUGIN_TRANSPORT_VERBS_DEVICE_SLOTS_H_
