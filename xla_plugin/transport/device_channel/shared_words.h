#ifndef XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_SHARED_WORDS_H_
#define XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_SHARED_WORDS_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "xla_plugin/transport/device_channel/device_channel.h"
#include "xla_plugin/transport/device_channel/fd_mailbox.h"

namespace jaxhet {

// Message of the target to the source about a channel on one host.
struct SharedChannelInfo {
  SharedMemoryInfo memory;
  uint64_t slot_bytes;
  IpcHandleInfo slots_handle;  // handle of the slots' allocation, and the offset there,
  uint64_t slots_offset;       // or their address, in the same process
  FdMailboxInfo mailbox;       // for the source's memory that is to be pulled from
};

// A channel whose words, and `extra_bytes` of whole pages after them, both processes have mapped
// and both devices see.
class SharedWordsChannel : public DeviceChannel {
 public:
  SharedWordsChannel(Device& device, size_t extra_bytes);
  SharedWordsChannel(Device& device, const SharedMemoryInfo& memory, size_t extra_bytes);

  void Settle(Proxy& /*proxy*/) override { memory_.CloseFd(); }

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

std::string ToOffer(const SharedChannelInfo& info);
// Throws TransportError for other bytes.
SharedChannelInfo ParseSharedChannelInfo(std::string_view offer);

}  // namespace jaxhet

#endif  // XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_SHARED_WORDS_H_
