#ifndef XLA_PLUGIN_TRANSPORT_VERBS_SLOT_MEMORY_H_
#define XLA_PLUGIN_TRANSPORT_VERBS_SLOT_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "xla_plugin/transport/verbs/nics.h"

namespace jaxhet::verbs {

// Memory that NICs read and write, registered with each of them.
class NicMemory {
 public:
  using NicList = std::span<const std::shared_ptr<Nic>>;

  NicMemory(const NicMemory&) = delete;
  NicMemory& operator=(const NicMemory&) = delete;

  const MemoryRegion& region(size_t nic) const { return regions_.at(nic); }

 protected:
  explicit NicMemory(NicList nics) : nics_(nics.begin(), nics.end()) {}
  ~NicMemory() = default;

  NicList nics() const { return nics_; }
  // `add(domain, regions)` for each NIC.
  template <typename Add>
  void Register(Add add) {
    for (const auto& nic : nics_) add(nic->domain, regions_);
  }
  void Deregister() { regions_.clear(); }

 private:
  std::vector<std::shared_ptr<Nic>> nics_;
  std::deque<MemoryRegion> regions_;
};

// Slots of one size in such memory. Does not own it.
struct SlotMemory {
  const NicMemory* memory;
  std::byte* first;  // address that NICs use
  size_t slot_bytes;

  uint64_t address(size_t slot) const {
    return reinterpret_cast<uint64_t>(first + slot * slot_bytes);
  }
  const MemoryRegion& region(size_t nic) const { return memory->region(nic); }
};

// Memory of the host, which somebody else owns.
class HostRegion final : public NicMemory {
 public:
  HostRegion(NicList nics, std::span<std::byte> memory, int access);
};

// Slots in host memory, which forked children do not inherit (MADV_DONTFORK): copy-on-write would
// move pages that the NIC has pinned.
class Staging {
 public:
  Staging(NicMemory::NicList nics, size_t num_slots, size_t slot_bytes, int access);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  SlotMemory slots() const { return {region_.get(), memory_.data(), slot_bytes_}; }
  size_t slot_bytes() const { return slot_bytes_; }
  std::byte* slot(size_t index) const { return memory_.data() + index * slot_bytes_; }

 private:
  std::span<std::byte> memory_;
  size_t slot_bytes_;
  std::unique_ptr<HostRegion> region_;
};

}  // namespace jaxhet::verbs

#endif  // XLA_PLUGIN_TRANSPORT_VERBS_SLOT_MEMORY_H_
