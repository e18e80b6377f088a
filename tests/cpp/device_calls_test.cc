#include <algorithm>
#include <atomic>
#include <iterator>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/cpp/simulated_ranks.h"
#include "tests/cpp/testing.h"
#include "tests/cpp/world.h"
#include "xla_plugin/base/strings.h"

// Driver calls of exchanges between devices, whose order decides both results and speed.
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
  exchange.num_bytes = random() % (random() % 2 == 0 ? options.eager_bytes + 1
                                                     : options.slot_bytes * (1 + random() % 11));
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
  exchange.ranks = members;
  exchange.group_size = num_ranks;
  exchange.skips_own = random() % 2 == 0;
  return exchange;
}

size_t NumParts(const SimulatedExchange& exchange) {
  if (exchange.part_bytes == 0 || exchange.part_bytes >= exchange.num_bytes) return 1;
  return (exchange.num_bytes + exchange.part_bytes - 1) / exchange.part_bytes;
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

TEST(DeviceCallsTest, RandomExchangesHaveEachByte) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    SimulatedOptions options;
    options.num_ranks = 2 + static_cast<int>(seed % 3);
    options.is_zero_copy = seed % 2 == 0;
    CheckRandomExchanges(options, seed);
  }
}

constexpr size_t kLongBytes = 2'500;  // three slots

SimulatedOptions ZeroCopyOptions() {
  SimulatedOptions options;
  options.is_zero_copy = true;
  return options;
}

size_t Count(std::string_view text, std::string_view part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string_view::npos; at = text.find(part, at + 1)) {
    ++count;
  }
  return count;
}

// Calls in full beside the difference, so that they can be copied.
void ExpectCalls(SimulatedRanks& ranks, std::string_view expected,
                 const Location& location = Location::current()) {
  const CalledAt here(location);
  const std::string calls = ranks.Calls();
  if (expected.starts_with('\n')) expected.remove_prefix(1);
  EXPECT_EQ(calls, expected) << "the calls are\n" << calls;
}

void ExpectRight(SimulatedRanks& ranks, int64_t index,
                 const Location& location = Location::current()) {
  const CalledAt here(location);
  EXPECT_TRUE(ranks.Run()) << "the streams do not end";
  EXPECT_TRUE(ranks.IsRight(0, index));
  EXPECT_TRUE(ranks.IsRight(1, index));
}

// Both ranks; the calls are those of rank 0 alone.
void StartBoth(SimulatedRanks& ranks, int64_t index, const SimulatedExchange& exchange) {
  for (const int rank : {1, 0}) {
    ranks.Calls();
    ranks.Start(rank, index, exchange);
  }
}

TEST(DeviceCallsTest, EagerIsSentAtTheStartAndReceivedAtTheDone) {
  SimulatedRanks ranks({});
  StartBoth(ranks, 0, SwapOf(7));
  ExpectCalls(ranks, R"(
0 program: copy 0>1.slot[0] <- 0.x0[0], 7
0 program: write 0>1.tail[0] = 1; write 0.sent[program] = 1
)");
  ranks.Done(0, 0);
  ExpectCalls(ranks, R"(
0 program: wait 1>0.tail[0] >= 1
0 program: copy 0.y0[0] <- 1>0.slot[0], 7
0 program: write 1>0.head[0] = 1
0 program: wait 1>0.abort >= 2147483647; write 0.received[program] = 1
0 program: wait 0.go_on >= 1
)");
  ranks.Done(1, 0);
  ExpectRight(ranks, 0);
}

TEST(DeviceCallsTest, ChunksTakeTurnsOnTheStreams) {
  SimulatedRanks ranks({});
  StartBoth(ranks, 0, SwapOf(kLongBytes));
  ExpectCalls(ranks, R"(
0 program: record event 0
0 send0: wait event 0
0 send1: wait event 0
0 send0: copy 0>1.slot[0] <- 0.x0[0], 1000
0 send1: copy 0>1.slot[1] <- 0.x0[1000], 1000
0 send0: write 0>1.tail[0] = 1
0 send0: copy 0>1.slot[2] <- 0.x0[2000], 500
0 send0: write 0>1.tail[2] = 1; write 0.sent[0] = 1
0 send1: write 0>1.tail[1] = 1; write 0.sent[1] = 1
0 program: write 0.reached = 1
0 receive0: wait event 0
0 receive1: wait event 0
0 receive0: wait 1>0.tail[0] >= 1
0 receive0: copy 0.y0[0] <- 1>0.slot[0], 1000
0 receive1: wait 1>0.tail[1] >= 1
0 receive1: copy 0.y0[1000] <- 1>0.slot[1], 1000
0 receive0: write 1>0.head[0] = 1
0 receive0: wait 1>0.tail[2] >= 1
0 receive0: copy 0.y0[2000] <- 1>0.slot[2], 500
0 receive0: write 1>0.head[2] = 1
0 receive1: write 1>0.head[1] = 1
0 receive0: wait 1>0.abort >= 2147483647; write 0.received[0] = 1
0 receive1: wait 1>0.abort >= 2147483647; write 0.received[1] = 1
)");
  ranks.Done(0, 0);
  ExpectCalls(ranks, R"(
0 program: wait 0.received[0] >= 1; wait 0.received[1] >= 1; wait 0.sent[0] >= 1; wait 0.sent[1] >= 1; wait 0.go_on >= 1
)");
  ranks.Done(1, 0);
  ExpectRight(ranks, 0);
}

TEST(DeviceCallsTest, ChunksWaitForTheirSlots) {
  SimulatedRanks ranks({});
  ranks.Start(0, 0, SwapOf(8'000));
  ranks.Calls();
  ranks.Start(0, 1, SwapOf(1'001));
  ExpectCalls(ranks, R"(
0 program: record event 0
0 send0: wait event 0
0 send1: wait event 0
0 send0: wait 0>1.head[0] >= 1
0 send0: copy 0>1.slot[0] <- 0.x1[0], 1000
0 send1: wait 0>1.head[1] >= 1
0 send1: copy 0>1.slot[1] <- 0.x1[1000], 1
0 send0: write 0>1.tail[0] = 2; write 0.sent[0] = 2
0 send1: write 0>1.tail[1] = 2; write 0.sent[1] = 2
0 program: write 0.reached = 2
0 receive0: wait event 0
0 receive1: wait event 0
0 receive0: wait 1>0.tail[0] >= 2
0 receive0: copy 0.y1[0] <- 1>0.slot[0], 1000
0 receive1: wait 1>0.tail[1] >= 2
0 receive1: copy 0.y1[1000] <- 1>0.slot[1], 1
0 receive0: write 1>0.head[0] = 2
0 receive1: write 1>0.head[1] = 2
0 receive0: wait 1>0.abort >= 2147483647; write 0.received[0] = 2
0 receive1: wait 1>0.abort >= 2147483647; write 0.received[1] = 2
)");
}

// Behind sends that are not over, eager messages keep the order of the slots.
TEST(DeviceCallsTest, EagerBehindALongSendIsSentByTheStreams) {
  SimulatedRanks ranks({});
  ranks.Start(0, 0, SwapOf(kLongBytes));
  ranks.Calls();
  ranks.Start(0, 1, SwapOf(7));
  ExpectCalls(ranks, R"(
0 program: record event 0
0 send1: wait event 0
0 send1: copy 0>1.slot[3] <- 0.x1[0], 7
0 send1: write 0>1.tail[3] = 1; write 0.sent[1] = 2
0 program: write 0.reached = 2
)");
}

TEST(DeviceCallsTest, ZeroCopyIsReadByTheTarget) {
  SimulatedRanks ranks(ZeroCopyOptions());
  StartBoth(ranks, 0, SwapOf(kLongBytes));
  ExpectCalls(ranks, R"(
0 program: record event 0
0 program: write 0>1.ready = 1; write 0.reached = 1
0 receive1: wait event 0
0 receive1: wait 1>0.ready >= 1
0 receive1: copy 0.y0[0] <- 1.x0[0], 2500
0 receive1: wait 1>0.abort >= 2147483647; write 1>0.taken[1] = 1; write 0.received[1] = 1
)");
  ranks.Done(0, 0);
  ExpectCalls(ranks, R"(
0 program: wait 0>1.taken[1] >= 1; wait 0.received[1] >= 1; wait 0.go_on >= 1; write 0.sent[program] = 1
)");
  ranks.Done(1, 0);
  ExpectRight(ranks, 0);
}

TEST(DeviceCallsTest, ZeroCopyArrivesInParts) {
  SimulatedRanks ranks(ZeroCopyOptions());
  SimulatedExchange exchange = SwapOf(kLongBytes);
  exchange.part_bytes = 1'000;
  StartBoth(ranks, 0, exchange);
  ExpectCalls(ranks, R"(
0 program: record event 0
0 program: write 0>1.ready = 1; write 0.reached = 1
0 receive1: wait event 0
0 receive1: wait 1>0.ready >= 1
0 receive1: copy 0.y0[0] <- 1.x0[0], 1000
0 receive1: wait 1>0.abort >= 2147483647; write 0.received[1] = 1
0 receive1: copy 0.y0[1000] <- 1.x0[1000], 1000
0 receive1: wait 1>0.abort >= 2147483647; write 0.received[1] = 2
0 receive1: copy 0.y0[2000] <- 1.x0[2000], 500
0 receive1: wait 1>0.abort >= 2147483647; write 1>0.taken[1] = 1; write 0.received[1] = 3
)");
  for (int part = 0; part < 3; ++part) ranks.Done(0, 0);
  ExpectCalls(ranks, R"(
0 program: wait 0.received[1] >= 1; wait 0.go_on >= 1
0 program: wait 0.received[1] >= 2; wait 0.go_on >= 1
0 program: wait 0>1.taken[1] >= 1; wait 0.received[1] >= 3; wait 0.go_on >= 1; write 0.sent[program] = 1
)");
  for (int part = 0; part < 3; ++part) ranks.Done(1, 0);
  ExpectRight(ranks, 0);
}

TEST(DeviceCallsTest, LateSourceGoesThroughSlots) {
  SimulatedRanks ranks(ZeroCopyOptions());
  ranks.Start(0, 0, SwapOf(1'500));
  ExpectCalls(ranks, R"(
0 program: record event 0
0 program: write 0>1.ready = 1; write 0.reached = 1
)");
  ranks.Done(0, 0);
  ExpectCalls(ranks, R"(
0 receive0: wait event 0
0 receive1: wait event 0
0 receive0: wait 1>0.tail[0] >= 1
0 receive0: copy 0.y0[0] <- 1>0.slot[0], 1000
0 receive1: wait 1>0.tail[1] >= 1
0 receive1: copy 0.y0[1000] <- 1>0.slot[1], 500
0 receive0: write 1>0.head[0] = 1
0 receive1: write 1>0.head[1] = 1
0 receive0: wait 1>0.abort >= 2147483647; write 0.received[0] = 1
0 receive1: wait 1>0.abort >= 2147483647; write 0.received[1] = 1
0 program: wait 0>1.taken[1] >= 1; wait 0.received[0] >= 1; wait 0.received[1] >= 1; wait 0.go_on >= 1; write 0.sent[program] = 1
)");
  ranks.Start(1, 0, SwapOf(1'500));
  ranks.Done(1, 0);
  ExpectRight(ranks, 0);
}

TEST(DeviceCallsTest, OperandElsewhereGoesThroughSlots) {
  SimulatedRanks ranks(ZeroCopyOptions());
  SimulatedExchange exchange = SwapOf(1'500);
  exchange.is_elsewhere = true;
  StartBoth(ranks, 0, exchange);
  ExpectCalls(ranks, R"(
0 program: record event 0
0 send0: wait event 0
0 send1: wait event 0
0 send0: copy 0>1.slot[0] <- 0.x0[0], 1000
0 send1: copy 0>1.slot[1] <- 0.x0[1000], 500
0 send0: write 0>1.tail[0] = 1; write 0.sent[0] = 1
0 send1: write 0>1.tail[1] = 1; write 0.sent[1] = 1
0 program: write 0.reached = 1
0 receive0: wait event 0
0 receive1: wait event 0
0 receive0: wait 1>0.tail[0] >= 1
0 receive0: copy 0.y0[0] <- 1>0.slot[0], 1000
0 receive1: wait 1>0.tail[1] >= 1
0 receive1: copy 0.y0[1000] <- 1>0.slot[1], 500
0 receive0: write 1>0.head[0] = 1
0 receive1: write 1>0.head[1] = 1
0 receive0: wait 1>0.abort >= 2147483647; write 0.received[0] = 1
0 receive1: wait 1>0.abort >= 2147483647; write 0.received[1] = 1
)");
  ranks.Done(0, 0);
  ranks.Done(1, 0);
  ExpectRight(ranks, 0);
}

// Each end of the channels has its own slots, and threads or NICs move the bytes between them.
TEST(DeviceCallsTest, ProxiedChannelsHaveNoEagerMessages) {
  SimulatedOptions options;
  options.is_shared = false;
  SimulatedRanks ranks(options);
  StartBoth(ranks, 0, SwapOf(7));
  ranks.Done(0, 0);
  ExpectCalls(ranks, R"(
0 program: record event 0
0 send0: wait event 0
0 send0: copy 0>1.slot[0] <- 0.x0[0], 7
0 send0: write 0>1.tail[0] = 1; write 0.sent[0] = 1
0 program: write 0.reached = 1
0 receive0: wait event 0
0 receive0: wait 1>0.tail[0] >= 1
0 receive0: copy 0.y0[0] <- 1>0.slot[0], 7
0 receive0: write 1>0.head[0] = 1
0 receive0: wait 1>0.abort >= 2147483647; write 0.received[0] = 1
0 program: wait 0.received[0] >= 1; wait 0.sent[0] >= 1; wait 0.go_on >= 1
)");
}

TEST(DeviceCallsTest, ProxiedOperandUsesThePeersSlots) {
  SimulatedOptions options = ZeroCopyOptions();
  options.is_shared = false;
  SimulatedRanks ranks(options);
  SimulatedExchange exchange;
  exchange.ranks = {0, 1};
  exchange.num_bytes = 1'500;
  ranks.Start(0, 0, exchange);
  ranks.Done(0, 0);
  ExpectCalls(ranks, R"(
0 program: fill 0.y0[0] with 0, 1500
0 program: write 0>1.ready = 1; write 0.reached = 1
0 program: wait 0>1.taken[1] >= 1; wait 0.go_on >= 1; write 0.sent[program] = 1
)");
  exchange.is_elsewhere = true;
  ranks.Start(0, 1, exchange);
  ExpectCalls(ranks, R"(
0 program: fill 0.y1[0] with 0, 1500
0 program: record event 0
0 send0: wait event 0
0 send1: wait event 0
0 send0: copy 0>1.slot[2] <- 0.x1[0], 1000
0 send1: copy 0>1.slot[3] <- 0.x1[1000], 500
0 send0: write 0>1.tail[2] = 1; write 0.sent[0] = 1
0 send1: write 0>1.tail[3] = 1; write 0.sent[1] = 1
0 program: write 0.reached = 2
)");
}

TEST(DeviceCallsTest, RankWithoutASourceGetsZeros) {
  SimulatedOptions options;
  options.num_ranks = 3;
  SimulatedRanks ranks(options);
  SimulatedExchange exchange;
  exchange.ranks = {0, 1};
  exchange.num_bytes = 1'500;
  for (int rank = 0; rank < 3; ++rank) ranks.Start(rank, 0, exchange);
  for (int rank = 0; rank < 3; ++rank) ranks.Done(rank, 0);
  ExpectCalls(ranks, R"(
0 program: fill 0.y0[0] with 0, 1500
0 program: record event 0
0 send0: wait event 0
0 send1: wait event 0
0 send0: copy 0>1.slot[0] <- 0.x0[0], 1000
0 send1: copy 0>1.slot[1] <- 0.x0[1000], 500
0 send0: write 0>1.tail[0] = 1; write 0.sent[0] = 1
0 send1: write 0>1.tail[1] = 1; write 0.sent[1] = 1
0 program: write 0.reached = 1
1 program: record event 0
1 program: write 1.reached = 1
1 receive0: wait event 0
1 receive1: wait event 0
1 receive0: wait 0>1.tail[0] >= 1
1 receive0: copy 1.y0[0] <- 0>1.slot[0], 1000
1 receive1: wait 0>1.tail[1] >= 1
1 receive1: copy 1.y0[1000] <- 0>1.slot[1], 500
1 receive0: write 0>1.head[0] = 1
1 receive1: write 0>1.head[1] = 1
1 receive0: wait 0>1.abort >= 2147483647; write 1.received[0] = 1
1 receive1: wait 0>1.abort >= 2147483647; write 1.received[1] = 1
2 program: fill 2.y0[0] with 0, 1500
2 program: write 2.reached = 1
0 program: wait 0.sent[0] >= 1; wait 0.sent[1] >= 1; wait 0.go_on >= 1
1 program: wait 1.received[0] >= 1; wait 1.received[1] >= 1; wait 1.go_on >= 1
2 program: wait 2.go_on >= 1
)");
  EXPECT_TRUE(ranks.Run());
  for (int rank = 0; rank < 3; ++rank) EXPECT_TRUE(ranks.IsRight(rank, 0));
}

SimulatedExchange GroupExchange(ExchangeKind kind, int num_ranks, size_t num_bytes) {
  SimulatedExchange exchange;
  exchange.kind = kind;
  for (int rank = 0; rank < num_ranks; ++rank) exchange.ranks.push_back(rank);
  exchange.group_size = num_ranks;
  exchange.num_bytes = num_bytes;
  return exchange;
}

// The own block is a copy: of the program's stream if it is short, else of one that no transfer
// uses at that time.
TEST(DeviceCallsTest, OwnBlockIsCopied) {
  SimulatedOptions options = ZeroCopyOptions();
  options.num_ranks = 3;
  SimulatedRanks ranks(options);
  const SimulatedExchange eager = GroupExchange(ExchangeKind::kAllToAll, 3, 10);
  for (const int rank : {1, 2, 0}) {
    ranks.Calls();
    ranks.Start(rank, 0, eager);
  }
  ExpectCalls(ranks, R"(
0 program: copy 0>1.slot[0] <- 0.x0[10], 10
0 program: write 0>1.tail[0] = 1; write 0.sent[program] = 1
0 program: copy 0>2.slot[0] <- 0.x0[20], 10
0 program: write 0>2.tail[0] = 1; write 0.sent[program] = 2
0 program: copy 0.y0[0] <- 0.x0[0], 10
)");
  const SimulatedExchange longer = GroupExchange(ExchangeKind::kAllGather, 3, 1'500);
  for (const int rank : {1, 2, 0}) {
    ranks.Calls();
    ranks.Start(rank, 1, longer);
  }
  ExpectCalls(ranks, R"(
0 program: record event 0
0 program: write 0>1.ready = 2; write 0.reached = 4
0 receive0: wait event 0
0 receive0: wait 2>0.ready >= 2
0 receive0: copy 0.y1[3000] <- 2.x1[0], 1500
0 receive0: wait 2>0.abort >= 2147483647; write 2>0.taken[0] = 2; write 0.received[0] = 1
0 program: record event 0
0 program: write 0>2.ready = 2
0 receive0: wait event 0
0 receive0: wait 1>0.ready >= 2
0 receive0: copy 0.y1[1500] <- 1.x1[0], 1500
0 receive0: wait 1>0.abort >= 2147483647; write 1>0.taken[0] = 2; write 0.received[0] = 2
0 program: record event 0
0 receive1: wait event 0
0 receive1: copy 0.y1[0] <- 0.x1[0], 1500
0 receive1: write 0.received[1] = 1
)");
  ranks.Done(0, 1);
  ranks.Done(0, 0);
  ExpectCalls(ranks, R"(
0 program: wait 0>1.taken[0] >= 2; wait 0.received[0] >= 1; wait 0.go_on >= 1; write 0.sent[program] = 3
0 program: wait 0>2.taken[0] >= 2; wait 0.received[0] >= 2; wait 0.go_on >= 2; write 0.sent[program] = 4
0 program: wait 0.received[1] >= 1; wait 0.go_on >= 3
0 program: wait 2>0.tail[0] >= 1
0 program: copy 0.y0[20] <- 2>0.slot[0], 10
0 program: write 2>0.head[0] = 1
0 program: wait 2>0.abort >= 2147483647; write 0.received[program] = 1
0 program: wait 0.go_on >= 4; wait 1>0.tail[0] >= 1
0 program: copy 0.y0[10] <- 1>0.slot[0], 10
0 program: write 1>0.head[0] = 1
0 program: wait 1>0.abort >= 2147483647; write 0.received[program] = 2
0 program: wait 0.go_on >= 5; wait 0.go_on >= 6
)");
  for (const int rank : {1, 2}) {
    for (const int64_t index : {0, 1}) ranks.Done(rank, index);
  }
  ExpectRight(ranks, 0);
  ExpectRight(ranks, 1);
}

TEST(DeviceCallsTest, AnotherStreamLeavesItsCopiesToOurs) {
  SimulatedRanks ranks(ZeroCopyOptions());
  for (const int rank : {1, 0}) {
    ranks.Calls();
    ranks.Start(rank, 0, SwapOf(7), Program::kFirst);
    ranks.Start(rank, 1, SwapOf(7), Program::kOther);
    ranks.Start(rank, 2, SwapOf(1'500), Program::kOther);
    ranks.Start(rank, 3, SwapOf(1'500), Program::kFirst);
  }
  ExpectCalls(ranks, R"(
0 program: copy 0>1.slot[0] <- 0.x0[0], 7
0 program: write 0>1.tail[0] = 1; write 0.sent[program] = 1
0 other: record event 0
0 send1: wait event 0
0 send1: copy 0>1.slot[1] <- 0.x1[0], 7
0 send1: write 0>1.tail[1] = 1; write 0.sent[1] = 1
0 other: write 0.reached = 2
0 receive1: wait event 0
0 receive1: wait 1>0.tail[1] >= 1
0 receive1: copy 0.y1[0] <- 1>0.slot[1], 7
0 receive1: write 1>0.head[1] = 1
0 receive1: wait 1>0.abort >= 2147483647; write 0.received[1] = 1
0 other: record event 0
0 send0: wait event 0
0 send1: wait event 0
0 send0: copy 0>1.slot[2] <- 0.x2[0], 1000
0 send1: copy 0>1.slot[3] <- 0.x2[1000], 500
0 send0: write 0>1.tail[2] = 1; write 0.sent[0] = 1
0 send1: write 0>1.tail[3] = 1; write 0.sent[1] = 2
0 other: write 0.reached = 3
0 receive0: wait event 0
0 receive1: wait event 0
0 receive0: wait 1>0.tail[2] >= 1
0 receive0: copy 0.y2[0] <- 1>0.slot[2], 1000
0 receive1: wait 1>0.tail[3] >= 1
0 receive1: copy 0.y2[1000] <- 1>0.slot[3], 500
0 receive0: write 1>0.head[2] = 1
0 receive1: write 1>0.head[3] = 1
0 receive0: wait 1>0.abort >= 2147483647; write 0.received[0] = 1
0 receive1: wait 1>0.abort >= 2147483647; write 0.received[1] = 2
0 program: record event 0
0 program: write 0>1.ready = 4; write 0.reached = 4
0 receive0: wait event 0
0 receive0: wait 1>0.ready >= 4
0 receive0: copy 0.y3[0] <- 1.x3[0], 1500
0 receive0: wait 1>0.abort >= 2147483647; write 1>0.taken[0] = 4; write 0.received[0] = 2
)");
  for (const int64_t index : {0, 1, 2, 3}) ranks.Done(0, index, Program::kOther);
  ExpectCalls(ranks, R"(
0 other: record event 0
0 receive0: wait event 0
0 receive0: wait 1>0.tail[0] >= 1
0 receive0: copy 0.y0[0] <- 1>0.slot[0], 7
0 receive0: write 1>0.head[0] = 1
0 receive0: wait 1>0.abort >= 2147483647; write 0.received[0] = 3
0 other: wait 0.received[0] >= 3; wait 0.sent[program] >= 1; wait 0.go_on >= 1
0 other: wait 0.received[1] >= 1; wait 0.sent[1] >= 1; wait 0.go_on >= 2
0 other: wait 0.received[0] >= 1; wait 0.received[1] >= 2; wait 0.sent[0] >= 1; wait 0.sent[1] >= 2; wait 0.go_on >= 3
0 send0: wait 0>1.taken[0] >= 4; write 0.sent[0] = 2
0 other: wait 0.received[0] >= 2; wait 0.sent[0] >= 2; wait 0.go_on >= 4
)");
  for (const int64_t index : {0, 1, 2, 3}) ranks.Done(1, index);
  for (const int64_t index : {0, 1, 2, 3}) ExpectRight(ranks, index);
}

// The slot of an eager message is needed again before its done.
TEST(DeviceCallsTest, OverdueEagerIsReceivedByTheStreams) {
  SimulatedRanks ranks({});
  for (int64_t index = 0; index < kChannelSlots; ++index) StartBoth(ranks, index, SwapOf(7));
  ranks.Start(1, kChannelSlots, SwapOf(7));
  ranks.Calls();
  ranks.Start(0, kChannelSlots, SwapOf(7));
  ExpectCalls(ranks, R"(
0 program: record event 0
0 receive0: wait event 0
0 receive0: wait 1>0.tail[0] >= 1
0 receive0: copy 0.y0[0] <- 1>0.slot[0], 7
0 receive0: write 1>0.head[0] = 1
0 receive0: wait 1>0.abort >= 2147483647; write 0.received[0] = 1
0 send0: wait event 0
0 send0: wait 0>1.head[0] >= 1
0 send0: copy 0>1.slot[0] <- 0.x8[0], 7
0 send0: write 0>1.tail[0] = 2; write 0.sent[0] = 1
0 program: write 0.reached = 9
)");
  for (int64_t index = 0; index <= kChannelSlots; ++index) {
    for (const int rank : {0, 1}) ranks.Done(rank, index);
  }
  for (int64_t index = 0; index <= kChannelSlots; ++index) ExpectRight(ranks, index);
}

// The later exchange turns out to need the eager message's slot when the eager one is done.
void CheckOverdueAtTheDone(Program program) {
  SimulatedRanks ranks(ZeroCopyOptions());
  SimulatedExchange longer = SwapOf(9'000);
  longer.is_elsewhere = true;
  ranks.Start(0, 0, SwapOf(7));
  ranks.Start(0, 1, longer);
  ranks.Start(1, 0, SwapOf(7));
  ranks.Start(1, 1, longer);
  ranks.Calls();
  ranks.Done(0, 0, program);
  EXPECT_EQ(Count(ranks.Calls(), "copy 0.y0["), size_t{1});
  ranks.Done(0, 1);
  for (const int64_t index : {0, 1}) ranks.Done(1, index);
  for (const int64_t index : {0, 1}) ExpectRight(ranks, index);
}

TEST(DeviceCallsTest, OverdueEagerIsReceivedOnce) {
  CheckOverdueAtTheDone(Program::kFirst);
  CheckOverdueAtTheDone(Program::kOther);
}

// A later exchange whose source is not there does not stop it.
TEST(DeviceCallsTest, EagerDoneOnAnotherStreamIsWaitedFor) {
  SimulatedRanks ranks(ZeroCopyOptions());
  ranks.Start(0, 0, SwapOf(7));
  ranks.Start(0, 1, SwapOf(1'500));
  ranks.Calls();
  ranks.Done(0, 0, Program::kOther);
  ExpectCalls(ranks, R"(
0 other: record event 1
0 receive0: wait event 1
0 receive0: wait 1>0.tail[0] >= 1
0 receive0: copy 0.y0[0] <- 1>0.slot[0], 7
0 receive0: write 1>0.head[0] = 1
0 receive0: wait 1>0.abort >= 2147483647; write 0.received[0] = 1
0 other: wait 0.received[0] >= 1; wait 0.sent[program] >= 1; wait 0.go_on >= 1
)");
  EXPECT_FALSE(ranks.Run());
  for (const int64_t index : {0, 1}) ranks.Start(1, index, SwapOf(index == 0 ? 7 : 1'500));
  ranks.Done(0, 1);
  for (const int64_t index : {0, 1}) ranks.Done(1, index);
  for (const int64_t index : {0, 1}) ExpectRight(ranks, index);
}

// After a failure a result that has not arrived is poison, and no stream waits any more.
TEST(DeviceCallsTest, AbandonedResultsArePoisoned) {
  SimulatedRanks ranks(ZeroCopyOptions());
  ranks.Start(0, 0, SwapOf(7));
  ranks.Start(0, 1, SwapOf(1'500));
  for (const int64_t index : {1, 0}) ranks.Done(0, index);
  ranks.Calls();
  EXPECT_FALSE(ranks.Run());
  ranks.rank(0).rescue().Stop();
  std::atomic<bool> is_over = false;
  std::thread streams([&] {
    while (!is_over) ranks.Run();
  });
  EXPECT_TRUE(ranks.rank(0).rescue().Abandon(kLong));
  is_over = true;
  streams.join();
  ExpectCalls(ranks, R"(
0 rescue: fill 0.y1[0] with 255, 1500
0 rescue: fill 0.y0[0] with 255, 7
)");
  EXPECT_TRUE(ranks.Run());
  for (const int64_t index : {0, 1}) EXPECT_TRUE(ranks.IsFilledWith(0, index, kSimulatedPoison));
}

}  // namespace
}  // namespace jaxhet::testing
