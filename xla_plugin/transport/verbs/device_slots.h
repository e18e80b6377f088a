#ifndef XLA_PLUGIN_TRANSPORT_VERBS_DEVICE_SLOTS_H_
#define XLA_PLUGIN_TRANSPORT_VERBS_DEVICE_SLOTS_H_

#include <cstddef>
#include <deque>
#include <string>

#include "xla_plugin/device/device.h"
#include "xla_plugin/transport/verbs/loopback.h"
#include "xla_plugin/transport/verbs/slot_memory.h"

namespace jaxhet::verbs {

// Slots that a device and NICs share: memory of the device, registered as a dma-buf or else through
// the peer-memory module, or else pinned memory of the host. A way is used only if each NIC has
// read what the device wrote there, and the device what each NIC wrote: some kernels register
// memory and then lose what is written to it.
class DeviceSlots final : public SlotMemory {
 public:
  DeviceSlots(Device& device, NicList nics, const Options& options, size_t num_slots,
              size_t slot_bytes);
  ~DeviceSlots() override;

  // As the device names the first one.
  void* device_address() const { return device_address_; }
  // "dma-buf", "peer memory" or "pinned memory (dma-buf: ...; peer memory: ...)".
  const std::string& way() const { return way_; }
  bool is_pinned() const { return loopbacks_.empty(); }
  // After NIC `nic` has written to the slot: lets the device see it, or throws TransportError.
  void Flush(size_t slot, size_t nic);

 private:
  bool Try(std::string_view way, void (DeviceSlots::*register_memory)(Device&), Device& device);
  void RegisterDmaBuf(Device& device);
  void RegisterPeerMemory(Device& device);
  void RegisterPinned(Device& device, size_t num_bytes);
  void Prove(Device& device);
  void ProveAt(Device& device, size_t nic, size_t offset);

  std::span<std::byte> memory_;  // as NICs name it
  DeviceMemory device_memory_;
  PinnedMemory pinned_memory_;
  void* device_address_ = nullptr;
  std::string way_;
  std::string refusals_;
  std::deque<Loopback> loopbacks_;  // of each NIC; none for pinned memory
};

}  // namespace jaxhet::verbs

#endif  // XLA_PLUGIN_TRANSPORT_VERBS_DEVICE_SLOTS_H_
