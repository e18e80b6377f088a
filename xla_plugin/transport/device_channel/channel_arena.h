#ifndef XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_CHANNEL_ARENA_H_
#define XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_CHANNEL_ARENA_H_

#include <cstddef>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "xla_plugin/device/device.h"
#include "xla_plugin/net/verbs/memory.h"
#include "xla_plugin/net/verbs/nics.h"

namespace jaxhet {

// Pinned host memory of one end of a channel.
struct ArenaPiece {
  std::byte* words = nullptr;
  void* words_on_device = nullptr;
  std::byte* slots = nullptr;
  void* slots_on_device = nullptr;
  size_t slot_bytes = 0;
  std::span<const std::shared_ptr<verbs::Nic>> nics;  // NICs that reach the slots
  const verbs::NicMemory* nic_memory = nullptr;       // null if none does
};

// Memory of a rank for the channels that are opened while its device works. The driver gives it at
// the start: a call later could wait for work of the device that waits for a peer, and hold up the
// launches of another device meanwhile.
class ChannelArena {
 public:
  // Room for channels to and from each of these ranks.
  ChannelArena(Device& device, std::span<const int> peer_ranks, size_t slot_bytes);
  ChannelArena(const ChannelArena&) = delete;
  ChannelArena& operator=(const ChannelArena&) = delete;

  // Set-up: lets NICs reach the memory.
  void Register(std::vector<std::shared_ptr<verbs::Nic>> nics);
  // Null for a rank that has none. Stays valid.
  const ArenaPiece* PieceFor(int peer_rank, bool is_incoming) const;

 private:
  PinnedMemory memory_;
  std::span<std::byte> bytes_;
  std::vector<std::shared_ptr<verbs::Nic>> nics_;
  std::unique_ptr<verbs::NicMemory> nic_memory_;
  std::map<std::pair<int, bool>, ArenaPiece> pieces_;
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_CHANNEL_ARENA_H_
