#include "xla_plugin/engine/device/rank_channels.h"

#include <utility>

#include "xla_plugin/base/error.h"

namespace jaxhet {

void RankChannels::AddOutgoing(int target, std::unique_ptr<RankChannel> channel) {
  const std::lock_guard lock(*mutex_);
  outgoing_[target] = std::move(channel);
}

void RankChannels::AddIncoming(int source, std::unique_ptr<RankChannel> channel) {
  const std::lock_guard lock(*mutex_);
  incoming_[source] = std::move(channel);
}

RankChannel& RankChannels::Find(const Channels& channels, int peer_rank) const {
  const std::lock_guard lock(*mutex_);
  const auto found = channels.find(peer_rank);
  if (found != channels.end()) return *found->second;
  Throw(ErrorCode::kUsage, "rank ", rank_, " has no device channel to or from rank ", peer_rank);
}

std::vector<std::pair<int, RankChannel*>> RankChannels::All(const Channels& channels) const {
  const std::lock_guard lock(*mutex_);
  std::vector<std::pair<int, RankChannel*>> all;
  for (const auto& [peer_rank, channel] : channels) all.emplace_back(peer_rank, channel.get());
  return all;
}

std::vector<ChannelBytes> RankChannels::Bytes() const {
  std::vector<ChannelBytes> bytes;
  for (const auto& [target, channel] : outgoing())
    bytes.push_back({.peer_rank = target,
                     .transport = channel->transport,
                     .sent = channel->num_bytes,
                     .path_failures = channel->end->num_path_failures(),
                     .refusals = {}});
  for (const auto& [source, channel] : incoming())
    bytes.push_back({.peer_rank = source,
                     .transport = channel->transport,
                     .received = channel->num_bytes,
                     .refusals = channel->refusals});
  return bytes;
}

}  // namespace jaxhet
