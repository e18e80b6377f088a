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

// Slots that NICs read and write, registered with each of them.
class SlotMemory {
 public:
  using NicList = std::span<const std::shared_ptr<Nic>>;

  virtual ~SlotMemory() = default;
  SlotMemory(const SlotMemory&) = delete;
  SlotMemory& operator=(const SlotMemory&) = delete;

  size_t slot_bytes() const { return slot_bytes_; }
  // As NICs name it.
  uint64_t address(size_t slot) const { return address_ + slot * slot_bytes_; }
  const MemoryRegion& region(size_t nic) const { return regions_.at(nic); }

 protected:
  SlotMemory(NicList nics, size_t slot_bytes)
      : nics_(nics.begin(), nics.end()), slot_bytes_(slot_bytes) {}

  NicList nics() const { return nics_; }
  // `add(domain, regions)` for each NIC; what was registered before goes.
  template <typename Add>
  void RegisterAt(const void* address, Add add) {
    regions_.clear();
    address_ = reinterpret_cast<uint64_t>(address);
    for (const auto& nic : nics_) add(nic->domain, regions_);
  }
  void Deregister() { regions_.clear(); }

 private:
  std::vector<std::shared_ptr<Nic>> nics_;
  size_t slot_bytes_;
  uint64_t address_ = 0;
  std::deque<MemoryRegion> regions_;
};

// Those of host memory. A forked child does not get it: it would copy what the NIC believes to be
// where it was.
class Staging final : public SlotMemory {
 public:
  Staging(NicList nics, size_t num_slots, size_t slot_bytes, int access);
  ~Staging() override;

  std::byte* slot(size_t index) const { return memory_.data() + index * slot_bytes(); }

 private:
  std::span<std::byte> memory_;
};

}  // namespace jaxhet::verbs

#endif  // XLA_PLUGIN_TRANSPORT_VERBS_SLOT_MEMORY_H_
