#ifndef XLA_PLUGIN_TRANSPORT_RING_SHARED_WORDS_H_
#define XLA_PLUGIN_TRANSPORT_RING_SHARED_WORDS_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "xla_plugin/transport/ring/fd_mailbox.h"
#include "xla_plugin/transport/ring/ring.h"

namespace jaxhet {

// Message of the target to the source about a ring on one host.
struct SharedRingInfo {
  SharedMemoryInfo memory;
  uint64_t slot_bytes;
  IpcHandleInfo slots_handle;  // handle of the slots' allocation, and the offset there,
  uint64_t slots_offset;       // or their address, in the same process
  FdMailboxInfo mailbox;       // for the source's memory that is to be pulled from
};

// A ring whose words, and `extra_bytes` of whole pages after them, both processes have mapped and
// both devices see.
class SharedWordsRing : public RingEnd {
 public:
  SharedWordsRing(Device& device, size_t extra_bytes);
  SharedWordsRing(Device& device, const SharedMemoryInfo& memory, size_t extra_bytes);

  void Settle() override { memory_.CloseFd(); }

 protected:
  const SharedMemoryInfo& memory_info() const { return memory_.info(); }
  // The device's address of the extra bytes.
  void* extra() const { return extra_; }

 private:
  void Register(Device& device);

  SharedMemory memory_;
  Registration registration_;
  void* extra_ = nullptr;
};

std::string ToOffer(const SharedRingInfo& info);
// Throws TransportError for other bytes.
SharedRingInfo ParseSharedRingInfo(std::string_view offer);

}  // namespace jaxhet

#endif  // XLA_PLUGIN_TRANSPORT_RING_SHARED_WORDS_H_
