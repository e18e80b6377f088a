#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "tests/cpp/simulated_ranks.h"
#include "tests/cpp/testing.h"

// Random exchanges of simulated devices, in random interleavings of their streams.
namespace jaxhet::testing {
namespace {

using Program = SimulatedRanks::Program;

// An exchange of a rank that is not done.
struct Open {
  int64_t index;
  size_t dones;  // one for each part
};

SimulatedExchange RandomExchange(std::mt19937& random, const SimulatedOptions& options) {
  const int num_ranks = options.num_ranks;
  SimulatedExchange exchange;
  std::vector<int64_t> members;
  for (int rank = 0; rank < num_ranks; ++rank) members.push_back(rank);
  std::ranges::shuffle(members, random);
  exchange.num_bytes =
      random() % (random() % 2 == 0 ? options.eager_bytes + 1
                                    : options.slot_bytes * (1 + random() % (kChannelSlots + 4)));
  exchange.is_elsewhere = random() % 4 == 0;
  if (random() % 3 > 0) {
    const size_t shift = 1 + random() % members.size();
    for (size_t i = 0; i < members.size(); ++i) {
      const int64_t target = members[(i + shift) % members.size()];
      if (target == members[i] || random() % 8 == 0) continue;
      exchange.ranks.insert(exchange.ranks.end(), {members[i], target});
    }
    if (random() % 2 == 0) exchange.part_bytes = exchange.num_bytes / (1 + random() % 4);
    return exchange;
  }
  exchange.kind = random() % 2 == 0 ? ExchangeKind::kAllGather : ExchangeKind::kAllToAll;
  exchange.ranks = std::move(members);
  exchange.group_size = num_ranks;
  exchange.skips_own = random() % 2 == 0;
  return exchange;
}

// Hosts and devices advance in a random order; ranks are done in orders of their own, on any
// stream.
void CheckRandomExchanges(const SimulatedOptions& options, unsigned seed) {
  constexpr int64_t kCount = 30;
  constexpr size_t kMostOpen = 12;
  std::mt19937 random(seed);
  SimulatedRanks ranks(options);
  std::vector<SimulatedExchange> exchanges;
  std::generate_n(std::back_inserter(exchanges), kCount,
                  [&] { return RandomExchange(random, options); });
  const bool is_other_used = random() % 2 == 0;
  const auto any_program = [&] {
    return is_other_used && random() % 6 == 0 ? Program::kOther : Program::kFirst;
  };
  std::vector<int64_t> started(static_cast<size_t>(options.num_ranks), 0);
  std::vector<std::vector<Open>> open(started.size());
  size_t num_left = started.size() * exchanges.size();
  while (num_left > 0) {
    const auto r = random() % started.size();
    const auto rank = static_cast<int>(r);
    ranks.RunSome(random, static_cast<int>(random() % 40));
    if (started[r] < kCount && open[r].size() < kMostOpen && random() % 2 == 0) {
      const int64_t index = started[r]++;
      const SimulatedExchange& exchange = exchanges[static_cast<size_t>(index)];
      ranks.Start(rank, index, exchange, any_program());
      open[r].push_back({index, NumParts(exchange)});
    } else if (!open[r].empty()) {
      Open& next = open[r][random() % open[r].size()];
      ranks.Done(rank, next.index, any_program());
      if (--next.dones > 0) continue;
      next = open[r].back();
      open[r].pop_back();
      --num_left;
    }
  }
  EXPECT_TRUE(ranks.Run());
  for (int rank = 0; rank < options.num_ranks; ++rank) {
    for (int64_t index = 0; index < kCount; ++index) {
      if (ranks.IsRight(rank, index)) continue;
      ADD_FAILURE() << "result of exchange " << index << " on rank " << rank << ", seed " << seed;
    }
  }
}

TEST(DeviceCallsRandomTest, RandomExchangesHaveEachByte) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    SimulatedOptions options;
    options.num_ranks = 2 + static_cast<int>(seed % 3);
    options.is_zero_copy = seed % 2 == 0;
    options.has_compute = true;
    CheckRandomExchanges(options, seed);
  }
}

}  // namespace
}  // namespace jaxhet::testing
