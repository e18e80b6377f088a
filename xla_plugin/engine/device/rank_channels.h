#ifndef XLA_PLUGIN_ENGINE_DEVICE_RANK_CHANNELS_H_
#define XLA_PLUGIN_ENGINE_DEVICE_RANK_CHANNELS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "xla_plugin/base/error.h"
#include "xla_plugin/engine/device/in_flight.h"
#include "xla_plugin/transport/device_channel/device_channel.h"
#include "xla_plugin/transport/transport.h"

namespace jaxhet {

// A channel and what this end has done on it.
struct RankChannel {
  std::unique_ptr<DeviceChannel> end;
  std::string_view transport;
  int process = 0;                // process of the other rank
  std::vector<Refusal> refusals;  // by the target: better transports, and why not them
  uint64_t exchanges = 0;
  std::atomic<uint64_t> chunks = 0;
  std::atomic<uint64_t> num_bytes = 0;

  // Whether so many bytes fit into one slot that both ends see.
  bool IsShort(size_t length) const {
    return end->is_shared() && NumChunks(length, end->slot_bytes()) == 1;
  }
  // For the source: whether the chunk's slot is known to be empty.
  bool IsFree(uint64_t chunk) const {
    return end->words().head.at(SlotOf(chunk)).host().load() + 1 >= GenerationOf(chunk);
  }
  // For the target: the route of an exchange; none while it has not been chosen.
  std::optional<RouteChoices::Route> ChosenRoute(uint64_t exchange, size_t result_bytes) const {
    if (result_bytes < end->pull_bytes()) return RouteChoices::Route::kSlots;
    return end->routes().Find(exchange);
  }
};

// The channels of a rank, by the other rank. Any thread may add one at any time; they stay.
class RankChannels {
 public:
  explicit RankChannels(int rank) : rank_(rank) {}

  void Add(int peer_rank, bool is_incoming, std::unique_ptr<RankChannel> channel) {
    const std::lock_guard lock(*mutex_);
    channels_[{peer_rank, is_incoming}] = std::move(channel);
  }
  // Memory for channels that are opened after the start; null for others. Set-up sets the arena.
  void SetArena(std::unique_ptr<const ChannelArena> arena) { arena_ = std::move(arena); }
  bool has_arena() const { return arena_ != nullptr; }
  const ArenaPiece* PieceFor(int peer_rank, bool is_incoming) const {
    return has_arena() ? arena_->PieceFor(peer_rank, is_incoming) : nullptr;
  }

  // They throw UsageError if there is no such channel.
  RankChannel& Outgoing(int target) const { return Find(target, false); }
  RankChannel& Incoming(int source) const { return Find(source, true); }
  // All channels that are there now, with the other rank.
  std::vector<std::pair<int, RankChannel*>> outgoing() const { return All(false); }
  std::vector<std::pair<int, RankChannel*>> incoming() const { return All(true); }
  // Channels there and back share paths, whose failures count for the one there.
  std::vector<PeerCounts> Counts() const {
    const std::lock_guard lock(*mutex_);
    std::vector<PeerCounts> counts;
    for (const auto& [key, channel] : channels_) {
      const bool is_incoming = key.second;
      const uint64_t num_bytes = channel->num_bytes;
      counts.push_back({.process = channel->process,
                        .transport = std::string(channel->transport),
                        .bytes_sent = is_incoming ? 0 : num_bytes,
                        .bytes_received = is_incoming ? num_bytes : 0,
                        .path_failures = is_incoming ? 0 : channel->end->num_path_failures(),
                        .refusals = channel->refusals});
    }
    return counts;
  }

 private:
  RankChannel& Find(int peer_rank, bool is_incoming) const {
    const std::lock_guard lock(*mutex_);
    const auto found = channels_.find({peer_rank, is_incoming});
    if (found != channels_.end()) return *found->second;
    Throw(ErrorCode::kUsage, "rank ", rank_, " has no device channel to or from rank ", peer_rank);
  }
  std::vector<std::pair<int, RankChannel*>> All(bool are_incoming) const {
    const std::lock_guard lock(*mutex_);
    std::vector<std::pair<int, RankChannel*>> all;
    for (const auto& [key, channel] : channels_) {
      if (key.second == are_incoming) all.emplace_back(key.first, channel.get());
    }
    return all;
  }

  int rank_;
  std::unique_ptr<const ChannelArena> arena_;
  std::unique_ptr<std::mutex> mutex_ = std::make_unique<std::mutex>();
  // By the other rank, and whether it is incoming. Under mutex_.
  std::map<std::pair<int, bool>, std::unique_ptr<RankChannel>> channels_;
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_ENGINE_DEVICE_RANK_CHANNELS_H_
