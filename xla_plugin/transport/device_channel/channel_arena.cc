#include "xla_plugin/transport/device_channel/channel_arena.h"

#include "xla_plugin/base/checked.h"
#include "xla_plugin/transport/device_channel/device_channel.h"

namespace jaxhet {
namespace {

constexpr size_t kWordsBytes = 4096;  // a page, so that slots begin at one
static_assert(sizeof(ChannelWords) <= kWordsBytes);

}  // namespace

ChannelArena::ChannelArena(Device& device, std::span<const int> peer_ranks, size_t slot_bytes) {
  const size_t piece_bytes = kWordsBytes + CheckedMultiply(kChannelSlots, slot_bytes);
  const size_t num_bytes = CheckedMultiply(2 * peer_ranks.size(), piece_bytes);
  memory_ = device.AllocatePinned(num_bytes);
  auto* host = static_cast<std::byte*>(memory_.get());
  auto* on_device = static_cast<std::byte*>(device.DeviceAddress(host));
  bytes_ = {host, num_bytes};
  for (const int peer_rank : peer_ranks) {
    for (const bool is_incoming : {false, true}) {
      pieces_[{peer_rank, is_incoming}] = {.words = host,
                                           .words_on_device = on_device,
                                           .slots = host + kWordsBytes,
                                           .slots_on_device = on_device + kWordsBytes,
                                           .slot_bytes = slot_bytes,
                                           .nics = {}};
      host += piece_bytes;
      on_device += piece_bytes;
    }
  }
}

void ChannelArena::Register(std::vector<std::shared_ptr<verbs::Nic>> nics) {
  nics_ = std::move(nics);
  nic_memory_ = std::make_unique<verbs::NicMemory>(nics_, bytes_, verbs::kPeerWrites);
  for (auto& [key, piece] : pieces_) {
    piece.nics = nics_;
    piece.nic_memory = nic_memory_.get();
  }
}

const ArenaPiece* ChannelArena::PieceFor(int peer_rank, bool is_incoming) const {
  const auto found = pieces_.find({peer_rank, is_incoming});
  return found == pieces_.end() ? nullptr : &found->second;
}

}  // namespace jaxhet
