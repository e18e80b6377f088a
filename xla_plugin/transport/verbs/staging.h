#ifndef XLA_PLUGIN_TRANSPORT_VERBS_STAGING_H_
#define XLA_PLUGIN_TRANSPORT_VERBS_STAGING_H_

#include <cstddef>
#include <cstdint>
#include <span>

namespace jaxhet::verbs {

// Slots of host memory for NICs to read or write. A forked child does not get it: it would copy
// what the NIC believes to be where it was.
class Staging {
 public:
  Staging(size_t num_slots, size_t slot_bytes);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  std::span<std::byte> memory() const { return memory_; }
  size_t slot_bytes() const { return slot_bytes_; }
  std::byte* slot(size_t index) const { return memory_.data() + index * slot_bytes_; }

 private:
  size_t slot_bytes_;
  std::span<std::byte> memory_;
};

}  // namespace jaxhet::verbs

#endif  // XLA_PLUGIN_TRANSPORT_VERBS_STAGING_H_
