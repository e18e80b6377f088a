#ifndef XLA_PLUGIN_NET_VERBS_MEMORY_H_
#define XLA_PLUGIN_NET_VERBS_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
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
  NicMemory(NicList nics, std::span<std::byte> memory, int access);
  NicMemory(NicList nics, std::span<std::byte> memory, const DmaBuf& dma_buf, int access);
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

}  // namespace jaxhet::verbs

#endif  // XLA_PLUGIN_NET_VERBS_MEMORY_H_
