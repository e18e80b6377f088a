#ifndef XLA_PLUGIN_ENGINE_DEVICE_RANK_CHANNELS_H_
#define XLA_PLUGIN_ENGINE_DEVICE_RANK_CHANNELS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "xla_plugin/engine/device/transfer_plan.h"
#include "xla_plugin/transport/device_channel/device_channel.h"
#include "xla_plugin/transport/transport.h"

namespace jaxhet {

// A channel and what this end has done on it.
struct RankChannel {
  std::unique_ptr<DeviceChannel> end;
  std::string_view transport;
  std::vector<Refusal> refusals;  // by the target: better transports, and why not them
  uint64_t exchanges = 0;
  std::atomic<uint64_t> chunks = 0;
  std::atomic<uint64_t> num_bytes = 0;

  ChannelState state() const {
    return {.slot_bytes = end->slot_bytes(), .is_shared = end->is_shared(), .next_chunk = chunks};
  }
  // By the source: whether the chunk's slot is known to be empty.
  bool IsFree(uint64_t chunk) const {
    return end->words().head.at(SlotOf(chunk)).host().load() + 1 >= GenerationOf(chunk);
  }
  // By the target: the route of an exchange; none while it has not been chosen.
  std::optional<RouteChoices::Route> ChosenRoute(uint64_t exchange, size_t result_bytes) const {
    if (result_bytes < end->pull_bytes()) return RouteChoices::Route::kSlots;
    return end->words().routes.Find(exchange);
  }
};

// Bytes moved by a channel to or from another rank. Channels there and back share paths, whose
// failures count for the one there.
struct ChannelBytes {
  int peer_rank = 0;
  std::string_view transport;
  uint64_t sent = 0;
  uint64_t received = 0;
  uint64_t path_failures = 0;
  std::vector<Refusal> refusals = {};
};

// The channels of a rank, by the other rank.
class RankChannels {
 public:
  using Channels = std::map<int, std::unique_ptr<RankChannel>>;

  explicit RankChannels(int rank) : rank_(rank) {}

  // Set-up.
  void AddOutgoing(int target, std::unique_ptr<RankChannel> channel);
  void AddIncoming(int source, std::unique_ptr<RankChannel> channel);

  // They throw UsageError if there is no such channel.
  RankChannel& Outgoing(int target) const { return Find(outgoing_, target); }
  RankChannel& Incoming(int source) const { return Find(incoming_, source); }
  const Channels& outgoing() const { return outgoing_; }
  const Channels& incoming() const { return incoming_; }
  // Sockets of all channels; see DeviceChannel.
  std::vector<int> SocketFds() const;
  std::vector<ChannelBytes> Bytes() const;

 private:
  RankChannel& Find(const Channels& channels, int peer_rank) const;

  int rank_;
  Channels outgoing_;
  Channels incoming_;
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_ENGINE_DEVICE_RANK_CHANNELS_H_
