#ifndef XLA_PLUGIN_NET_VERBS_DEVICE_SLOTS_H_
#define XLA_PLUGIN_NET_VERBS_DEVICE_SLOTS_H_

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "xla_plugin/device/device.h"
#include "xla_plugin/device/proof.h"
#include "xla_plugin/net/verbs/memory.h"

namespace jaxhet::verbs {

// Slots that a device and NICs share: in memory of the device, exported as a dma-buf, or in pinned
// memory of the host if NICs can't reach that. A dma-buf is used only if it was proven: some
// kernels register memory and then lose what is written to it.
class DeviceSlots {
 public:
  DeviceSlots(Device& device, NicList nics, const Options& options, size_t num_slots,
              size_t slot_bytes);
  // Slots in pinned memory that somebody else owns and has registered.
  DeviceSlots(Device& device, SlotMemory slots, void* device_address);
  ~DeviceSlots();
  DeviceSlots(const DeviceSlots&) = delete;
  DeviceSlots& operator=(const DeviceSlots&) = delete;

  SlotMemory slots() const { return slots_; }
  // Address of the first slot on the device.
  void* device_address() const { return device_address_; }
  // Why the slots are not in memory of the device; "" if they are.
  const std::string& why_pinned() const { return why_pinned_; }
  // After NIC `nic` has written to the slot: lets the device see it, or throws TransportError.
  void Flush(size_t slot, size_t nic);

 private:
  class Loopback;

  // Proves memory of the device: it sees what each NIC has copied there of what it wrote itself.
  // Throws TransportError at the first wrong byte.
  void Prove();

  Device& device_;
  std::vector<std::unique_ptr<Loopback>> loopbacks_;  // one for each NIC, for memory of the device
  DeviceMemory device_memory_;                        // one of the two
  PinnedMemory pinned_memory_;
  std::unique_ptr<NicMemory> region_;
  std::span<std::byte> bytes_;
  SlotMemory slots_;
  void* device_address_ = nullptr;
  std::string why_pinned_;
};

}  // namespace jaxhet::verbs

#endif  // XLA_PLUGIN_NET_VERBS_DEVICE_SLOTS_H_
