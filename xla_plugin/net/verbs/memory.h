#ifndef XLA_PLUGIN_NET_VERBS_MEMORY_H_
#define XLA_PLUGIN_NET_VERBS_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "xla_plugin/device/device.h"
#include "xla_plugin/net/verbs/nics.h"

namespace jaxhet::verbs {

using NicList = std::span<const std::shared_ptr<Nic>>;

inline constexpr int kPeerWrites = ibv::kAccessLocalWrite | ibv::kAccessRemoteWrite;

// Memory that NICs read and write, registered with each of them. Somebody else owns the memory.
class NicMemory {
 public:
  // Memory of the host, or of a device that has exported it as a dma-buf.
  NicMemory(NicList nics, std::span<std::byte> memory, int access, const DmaBuf* dma_buf = nullptr);
  NicMemory(const NicMemory&) = delete;
  NicMemory& operator=(const NicMemory&) = delete;

  const MemoryRegion& region(size_t nic) const { return regions_.at(nic); }

 private:
  std::vector<std::shared_ptr<Nic>> nics_;
  std::deque<MemoryRegion> regions_;
};

// Slots of one size in such memory. Does not own it.
struct SlotMemory {
  const NicMemory* memory = nullptr;  // null: no slots
  std::byte* first = nullptr;         // address that NICs use
  size_t slot_bytes = 0;

  uint64_t address(size_t slot) const {
    return reinterpret_cast<uint64_t>(first + slot * slot_bytes);
  }
  uint32_t lkey(size_t nic) const { return memory == nullptr ? 0 : memory->region(nic).lkey(); }
  uint32_t rkey(size_t nic) const { return memory == nullptr ? 0 : memory->region(nic).rkey(); }
};

// Slots in host memory, which forked children do not inherit (MADV_DONTFORK): copy-on-write would
// move pages that the NIC has pinned.
class Staging {
 public:
  Staging(NicList nics, size_t num_slots, size_t slot_bytes, int access);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  SlotMemory slots() const { return {region_.get(), memory_.data(), slot_bytes_}; }
  std::byte* slot(size_t index) const { return memory_.data() + index * slot_bytes_; }

 private:
  std::span<std::byte> memory_;
  size_t slot_bytes_;
  std::unique_ptr<NicMemory> region_;
};

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

#endif  // XLA_PLUGIN_NET_VERBS_MEMORY_H_
