#include "xla_plugin/engine/common/exchange.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>
#include <vector>

#include "xla_plugin/base/checked.h"

namespace jaxhet {

std::vector<int> GroupOf(std::span<const int64_t> ranks, int64_t group_size, int rank) {
  const auto size = CheckedCast<size_t>(group_size);
  if (size == 0 || ranks.size() % size != 0) {
    Throw(ErrorCode::kUsage, ranks.size(), " ranks do not make groups of ", group_size);
  }
  for (; !ranks.empty(); ranks = ranks.subspan(size)) {
    const auto group = ranks.first(size);
    if (std::ranges::find(group, rank) == group.end()) continue;
    std::vector<int> members;
    for (const int64_t member : group) {
      if (member >= 0) members.push_back(CheckedCast<int>(member));
    }
    return members;
  }
  Throw(ErrorCode::kUsage, "rank ", rank, " is in no group of the exchange");
}

std::vector<Pair> PairsOf(std::span<const int64_t> ranks) {
  if (ranks.size() % 2 != 0) {
    Throw(ErrorCode::kUsage, ranks.size(), " ranks do not make pairs of source and target");
  }
  std::vector<Pair> pairs;
  std::set<int> targets;
  for (; !ranks.empty(); ranks = ranks.subspan(2)) {
    pairs.push_back({CheckedCast<int>(ranks[0]), CheckedCast<int>(ranks[1])});
    if (!targets.insert(pairs.back().target).second) {
      Throw(ErrorCode::kUsage, "rank ", ranks[1], " is the target of two pairs of a permute");
    }
  }
  return pairs;
}

std::vector<int> ConnectedTo(int rank, std::span<const Pair> pairs) {
  std::map<int, std::vector<int>> neighbours;
  for (const auto [source, target] : pairs) {
    neighbours[source].push_back(target);
    neighbours[target].push_back(source);
  }
  std::set<int> connected = {rank};
  std::vector<int> next = {rank};
  while (!next.empty()) {
    const int from = next.back();
    next.pop_back();
    for (const int to : neighbours[from]) {
      if (connected.insert(to).second) next.push_back(to);
    }
  }
  return {connected.begin(), connected.end()};
}

std::map<int, RankExchange> PartsOf(const PlannedExchange& exchange, int64_t plan, int64_t index,
                                    std::span<const int> own_ranks) {
  const bool is_permute = exchange.kind == ExchangeKind::kPermute;
  const auto takes_part = [&](int rank) {
    return std::ranges::find(exchange.ranks, rank) != exchange.ranks.end();
  };
  RankExchange part;
  part.kind = exchange.kind;
  part.plan = plan;
  part.index = index;
  part.deadline_ms = exchange.deadline_ms;
  part.handle = exchange.handle;
  part.is_finish = exchange.is_finish;
  part.skips_own = exchange.skips_own;
  part.part_bytes = CheckedCast<size_t>(exchange.part_bytes);
  if (is_permute) {
    part.pairs = PairsOf(exchange.ranks);
  } else {
    part.group_size = CheckedCast<size_t>(exchange.group_size);
  }
  std::map<int, RankExchange> parts;
  for (const int rank : own_ranks) {
    if (!is_permute && !takes_part(rank)) continue;
    RankExchange& own = parts.emplace(rank, part).first->second;
    own.rank = rank;
    own.group = is_permute ? ConnectedTo(rank, part.pairs)
                           : GroupOf(exchange.ranks, exchange.group_size, rank);
    std::vector<int> siblings;
    std::ranges::copy_if(own_ranks, std::back_inserter(siblings),
                         [&](int other) { return other != rank && takes_part(other); });
    own.siblings = std::move(siblings);
  }
  return parts;
}

uint64_t CommunicatorId(std::span<const int> group) {
  uint64_t hash = 0xcbf2'9ce4'8422'2325;  // FNV-1a
  for (const int rank : group) {
    for (int shift = 0; shift < 32; shift += 8) {
      hash ^= (static_cast<uint32_t>(rank) >> shift) & 0xff;
      hash *= 0x0000'0100'0000'01b3;
    }
  }
  return hash;
}

}  // namespace jaxhet
