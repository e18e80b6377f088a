#include <algorithm>
#include <atomic>
#include <chrono>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cpp/simulated_ranks.h"
#include "tests/cpp/testing.h"
#include "tests/cpp/world.h"

// Exchanges of simulated devices, in random interleavings of their streams.
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
// stream, or in the order of starts on the first program's stream. Returns whether all streams end;
// then results are checked.
bool RandomExchangesEnd(const SimulatedOptions& options, unsigned seed, bool is_in_order) {
  constexpr int64_t kCount = 30;
  constexpr size_t kMostOpen = 12;
  std::mt19937 random(seed);
  SimulatedRanks ranks(options);
  std::vector<SimulatedExchange> exchanges;
  std::generate_n(std::back_inserter(exchanges), kCount,
                  [&] { return RandomExchange(random, options); });
  const bool is_other_used = !is_in_order && random() % 2 == 0;
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
      const auto next =
          open[r].begin() + static_cast<ptrdiff_t>(is_in_order ? 0 : random() % open[r].size());
      ranks.Done(rank, next->index, any_program());
      if (--next->dones > 0) continue;
      open[r].erase(next);
      --num_left;
    }
  }
  if (!ranks.Run()) return false;
  for (int rank = 0; rank < options.num_ranks; ++rank) {
    for (int64_t index = 0; index < kCount; ++index) {
      if (ranks.IsRight(rank, index)) continue;
      ADD_FAILURE() << "result of exchange " << index << " on rank " << rank << ", seed " << seed;
    }
  }
  return true;
}

TEST(SimulatedDeviceTest, RandomExchangesHaveEachByte) {
  for (unsigned seed = 0; seed < 60; ++seed) {
    SimulatedOptions options;
    options.num_ranks = 2 + static_cast<int>(seed % 3);
    options.is_zero_copy = seed % 2 == 0;
    options.has_compute = true;
    EXPECT_TRUE(RandomExchangesEnd(options, seed, false)) << "seed " << seed;
  }
}

// Number of runs that end, of 20 in which two streams share a hardware queue. Dones are in the
// order of starts, as in compiled programs.
int NumEndsWithOneQueue(const std::string& first, const std::string& second) {
  int num_ends = 0;
  for (unsigned seed = 0; seed < 20; ++seed) {
    SimulatedOptions options;
    options.num_ranks = 2 + static_cast<int>(seed % 3);
    options.is_zero_copy = seed % 2 == 0;
    options.has_compute = true;
    options.one_queue = {first, second};
    num_ends += RandomExchangesEnd(options, seed, true) ? 1 : 0;
  }
  return num_ends;
}

TEST(SimulatedDeviceTest, StreamsShareQueues) {
  EXPECT_EQ(NumEndsWithOneQueue("receive0", "receive1"), 20);
  for (const char* const other : {"receive0", "announce", "done"}) {
    EXPECT_EQ(NumEndsWithOneQueue(other, "program"), 20) << other;
  }
  for (const char* const other : {"send0", "receive0", "receive1"}) {
    EXPECT_EQ(NumEndsWithOneQueue(other, "announce"), 20) << other;
  }
  for (const char* const other : {"receive0", "receive1", "announce"}) {
    EXPECT_EQ(NumEndsWithOneQueue(other, "done"), 20) << other;
  }
}

// The send streams wait for emptied slots, so each needs a queue that no receive stream has.
TEST(SimulatedDeviceTest, SendsAndReceivesNeedQueuesOfTheirOwn) {
  EXPECT_LT(NumEndsWithOneQueue("send0", "receive0"), 20);
}

// A later exchange whose source is not there does not stop the receipt of an earlier one.
TEST(SimulatedDeviceTest, EagerDoneOnAnotherStreamIsWaitedFor) {
  SimulatedRanks ranks({.is_zero_copy = true});
  ranks.Start(0, 0, SwapOf(7));
  ranks.Start(0, 1, SwapOf(1'500));
  ranks.Done(0, 0, Program::kOther);
  EXPECT_FALSE(ranks.Run());
  for (const int64_t index : {0, 1}) ranks.Start(1, index, SwapOf(index == 0 ? 7 : 1'500));
  ranks.Done(0, 1);
  for (const int64_t index : {0, 1}) ranks.Done(1, index);
  EXPECT_TRUE(ranks.Run());
  for (const int rank : {0, 1}) {
    for (const int64_t index : {0, 1}) EXPECT_TRUE(ranks.IsRight(rank, index));
  }
}

// Abandons the exchanges in flight on rank 0 while its streams run.
void AbandonWhileStreamsRun(SimulatedRanks& ranks) {
  std::atomic<bool> is_over = false;
  std::thread streams([&] {
    while (!is_over) ranks.Run();
  });
  EXPECT_TRUE(ranks.rank(0).watch().Abandon(kLong));
  is_over = true;
  streams.join();
}

// A program that comes to its start after the first Abandon() was over finds poison, too.
TEST(SimulatedDeviceTest, AbandonGoesOnWhereItRanOutOfTime) {
  SimulatedRanks ranks({.is_zero_copy = true});
  ranks.Start(0, 0, SwapOf(1'500));
  ranks.Done(0, 0);
  ranks.rank(0).watch().Stop();
  EXPECT_FALSE(ranks.rank(0).watch().Abandon(std::chrono::milliseconds(10)));
  AbandonWhileStreamsRun(ranks);
  EXPECT_TRUE(ranks.Run());
  EXPECT_TRUE(ranks.IsFilledWith(0, 0, kSimulatedPoison));
}

// After a failure a result that has not arrived is poison, and no stream waits any more.
TEST(SimulatedDeviceTest, AbandonedResultsArePoisoned) {
  SimulatedRanks ranks({.is_zero_copy = true});
  ranks.Start(0, 0, SwapOf(7));
  ranks.Start(0, 1, SwapOf(1'500));
  for (const int64_t index : {1, 0}) ranks.Done(0, index);
  EXPECT_FALSE(ranks.Run());
  ranks.rank(0).watch().Stop();
  AbandonWhileStreamsRun(ranks);
  EXPECT_TRUE(ranks.Run());
  for (const int64_t index : {0, 1}) EXPECT_TRUE(ranks.IsFilledWith(0, index, kSimulatedPoison));
}

std::vector<DeviceTransfer> GatherPlan(int rank, std::vector<int> ranks, size_t num_bytes,
                                       size_t result_bytes) {
  std::vector<std::byte> operand(num_bytes);
  std::vector<std::byte> result(result_bytes);
  DeviceRequest request;
  request.kind = ExchangeKind::kAllGather;
  request.rank = rank;
  request.group = std::move(ranks);
  request.operand = operand;
  request.result = result;
  return PlanTransfers(request);
}

// Distances grow from one transfer to the next, so that no two ranks send to one at the same time.
TEST(SimulatedDeviceTest, TransfersOfAGroupAreByDistance) {
  constexpr int kRanks = 5;
  for (int rank = 0; rank < kRanks; ++rank) {
    const std::vector<DeviceTransfer> plan =
        GatherPlan(rank, {0, 1, 2, 3, 4}, 10, size_t{10} * kRanks);
    EXPECT_EQ(plan.size(), size_t{kRanks});
    for (int i = 0; i + 1 < kRanks; ++i) {
      const DeviceTransfer& transfer = plan.at(static_cast<size_t>(i));
      EXPECT_EQ(transfer.target, (rank + i + 1) % kRanks);
      EXPECT_EQ(transfer.source, (rank + kRanks - i - 1) % kRanks);
      EXPECT_FALSE(transfer.is_own);
    }
    EXPECT_TRUE(plan.back().is_own && plan.back().target < 0 && plan.back().source < 0);
  }
}

TEST(SimulatedDeviceTest, WrongSizesAreRefused) {
  EXPECT_THAT(ThrownText([] { (void)GatherPlan(0, {0, 1}, 100, 199); }),
              ::testing::HasSubstr("an exchange of 2 devices can't turn 100 bytes into 199"));
}

}  // namespace
}  // namespace jaxhet::testing
