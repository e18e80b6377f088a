#include <algorithm>
#include <deque>
#include <random>
#include <thread>

#include "tests/cpp/device_world.h"
#include "tests/cpp/host_device.h"
#include "tests/cpp/testing.h"
#include "xla_plugin/transport/device_channel/lane.h"
#include "xla_plugin/transport/device_channel/lane_channel.h"

// Exchanges between devices, on the device that every machine has: the host's memory.
namespace jaxhet::testing {
namespace {

using ::testing::HasSubstr;

using std::chrono::milliseconds;

class DeviceExchangeTransportsTest : public DeviceTransportsTest {};

INSTANTIATE_TEST_SUITE_P(Transports, DeviceExchangeTransportsTest,
                         ::testing::ValuesIn(TestedTransports()), &NameOfParam);

void CheckSwapsAnySize(std::string_view transport) {
  DeviceWorld world(DeviceOptions(2, transport));
  for (const size_t num_bytes :
       {size_t{0}, size_t{1}, size_t{7}, kEagerBytes, kEagerBytes + 1, kSlotBytes - 1, kSlotBytes,
        kSlotBytes + 1, kSlotBytes * kChannelSlots, kSlotBytes * kChannelSlots + 1,
        kSlotBytes * 27 + 5}) {
    ExpectSwap(world, num_bytes);
  }
}

TEST_P(DeviceExchangeTransportsTest, SwapsAnySize) { CheckSwapsAnySize(GetParam()); }

// A vendor needs no code but its folder and its row in the table.
TEST(DeviceExchangeTest, DevicesOfTwoVendorsSwap) {
  if (TestedTransports()[1] != "pulled") GTEST_SKIP() << "the host's device is the other vendor's";
  for (const std::string_view transport : {"host", "socket"}) {
    WorldOptions options = DeviceOptions(2, transport);
    options.has_two_vendors = true;
    DeviceWorld world(options);
    ExpectSwap(world, kSlotBytes * 3 + 1);
    const auto bytes = world.engine(0).devices()->Stats();
    EXPECT_GT(bytes.at(StrCat("bytes_sent_", transport)), 0U);
  }
}

TEST(DeviceExchangeTest, SwapsAnySizeSealed) { CheckSwapsAnySize("sealed"); }

// NICs can't encrypt, so the channels use sockets.
TEST(DeviceExchangeTest, SealedJobsDoWithoutRdma) {
  WorldOptions options = DeviceOptions(2, "verbs");
  options.engine.encryption = "auth";
  DeviceWorld world(options);
  ExpectSwap(world, kSlotBytes);
  const auto sent = [&] { return world.engine(0).devices()->Stats()["bytes_sent_socket"]; };
  EXPECT_TRUE(IsWithin(kLong, [&] { return sent() == kSlotBytes; }));
}

// Work of the program between two dones sees all earlier parts.
TEST_P(DeviceExchangeTransportsTest, ComesInParts) {
  constexpr size_t kPartBytes = kSlotBytes * 2 + 3;
  DeviceWorld world(DeviceOptions(2, GetParam()));
  struct Case {
    size_t num_bytes;
    size_t num_parts;
  };
  for (const auto& [num_bytes, num_parts] : {Case{0, 1}, Case{1, 1}, Case{kPartBytes, 1},
                                             Case{kPartBytes + 1, 2}, Case{kPartBytes * 4, 4}}) {
    Side zero(0, SwapPairs(), num_bytes);
    Side one(1, SwapPairs(), num_bytes);
    for (Side* const side : {&zero, &one}) side->InParts(kPartBytes).Start(world);
    std::vector<std::byte> seen(num_bytes);
    for (size_t i = 0; i < num_parts; ++i) {
      zero.Done(world);
      one.Done(world);
      const size_t begin = i * kPartBytes;
      world.device().Copy(world.stream(0), seen.data() + begin, zero.result.data() + begin,
                          std::min(kPartBytes, num_bytes - begin));
    }
    EXPECT_TRUE(world.IsIdleWithin(0, kLong) && world.IsIdleWithin(1, kLong));
    EXPECT_TRUE(std::ranges::equal(seen, one.operand) && one.IsFrom(0));
    EXPECT_EQ(zero.num_parts(), num_parts);
  }
  EXPECT_TRUE(IsWithin(kLong, [&] {
    return world.engine(0).devices()->Stats().at("exchanges_completed") == uint64_t{5};
  }));
}

TEST(DeviceExchangeTest, RanksMayDifferInParts) {
  constexpr size_t kBytes = kSlotBytes * 4;
  DeviceWorld world(DeviceOptions(2, "pulled"));
  Side zero(0, SwapPairs(), kBytes);
  Side one(1, SwapPairs(), kBytes);
  zero.InParts(kSlotBytes).Start(world);
  one.Start(world);
  for (int i = 0; i < 4; ++i) zero.Done(world);
  one.Done(world);
  EXPECT_TRUE(world.IsIdleWithin(0, kLong) && world.IsIdleWithin(1, kLong));
  EXPECT_TRUE(zero.IsFrom(1) && one.IsFrom(0));
}

TEST(DeviceExchangeTest, GroupsMayBeOfUnequalSize) {
  DeviceWorld world(DeviceOptions(3));
  for (const size_t num_bytes : {size_t{1}, kEagerBytes, kSlotBytes + 1}) {
    const Group pair{ExchangeKind::kAllGather, {1, 0, -1}};
    std::deque<Side> sides;
    for (const int rank : {0, 1}) sides.emplace_back(rank, pair, num_bytes);
    sides.emplace_back(2, Group{ExchangeKind::kAllGather, {2, -1, -1}}, num_bytes);
    const std::byte before = sides[0].result[0];
    RunSides(world, sides);
    for (const size_t rank : {0U, 1U}) {
      const Side& side = sides[rank];
      EXPECT_TRUE(side.HasBlockOf(0) && side.HasBlockOf(1));
      EXPECT_EQ(std::ranges::count(std::span(side.result).last(num_bytes), before),
                static_cast<ptrdiff_t>(num_bytes));
    }
    EXPECT_TRUE(sides[2].HasBlockOf(2));
  }
}

// More may be in flight than there are slots, and the dones may come in another order.
void CheckManyAreInFlight(std::string_view transport, size_t num_bytes) {
  DeviceWorld world(DeviceOptions(2, transport));
  constexpr int kCount = 40;
  std::deque<Side> zeros;
  std::deque<Side> ones;
  for (int i = 0; i < kCount; ++i) {
    zeros.emplace_back(0, SwapPairs(), num_bytes, i).Start(world);
    ones.emplace_back(1, SwapPairs(), num_bytes, i).Start(world);
  }
  for (int i = 0; i < kCount; ++i) {
    zeros[static_cast<size_t>(kCount - 1 - i)].Done(world);
    ones[static_cast<size_t>(i)].Done(world);
  }
  world.device().Synchronize(world.stream(0));
  world.device().Synchronize(world.stream(1));
  for (const Side& side : zeros) EXPECT_TRUE(side.IsFrom(1));
  for (const Side& side : ones) EXPECT_TRUE(side.IsFrom(0));
  const auto stats = world.engine(0).devices()->Stats();
  EXPECT_EQ(stats.at("exchanges_started"), uint64_t{kCount});
  EXPECT_EQ(stats.at(StrCat("bytes_sent_", NameOf(transport))), kCount * num_bytes);
  const bool is_pulled = num_bytes > kEagerBytes && transport == "pulled";
  EXPECT_EQ(stats.at("bytes_zero_copy_sent"), is_pulled ? kCount * num_bytes : 0);
  EXPECT_EQ(stats.at("bytes_zero_copy_received"), is_pulled ? kCount * num_bytes : 0);
}

TEST_P(DeviceExchangeTransportsTest, ManyAreInFlight) {
  for (const size_t num_bytes : {kEagerBytes, kSlotBytes + 3})
    CheckManyAreInFlight(GetParam(), num_bytes);
}

// Each end of a channel has a log of launches, whose entries are used again.
void CheckLogIsUsedAgain(std::string_view transport) {
  constexpr uint64_t kBatch = 32;
  DeviceWorld world(DeviceOptions(2, transport));
  for (uint64_t begin = 0; begin <= kProxiedLaunches + kChannelSlots; begin += kBatch) {
    std::deque<Side> sides;
    for (uint64_t i = begin; i < begin + kBatch; ++i) {
      const auto index = static_cast<int64_t>(i % 50);
      sides.emplace_back(0, SwapPairs(), 8, index).Start(world);
      sides.emplace_back(1, SwapPairs(), 8, index).Start(world);
    }
    for (const Side& side : sides) side.Done(world);
    EXPECT_TRUE(world.IsIdleWithin(0, kLong) && world.IsIdleWithin(1, kLong));
    for (size_t i = 0; i < sides.size(); ++i) EXPECT_TRUE(sides[i].IsFrom(i % 2 == 0 ? 1 : 0));
  }
}

// Between start and finish, the other exchanges of the program start and end.
TEST_P(DeviceExchangeTransportsTest, HandlesOutliveOtherExchanges) {
  constexpr int64_t kHandle = 5;
  DeviceWorld world(DeviceOptions(2, GetParam()));
  const auto of_handle = [&](const Pairs& pairs, size_t num_bytes, bool is_finish) {
    std::deque<Side> sides;
    for (const int rank : {0, 1}) {
      sides.emplace_back(rank, pairs, num_bytes).OfHandle(kHandle, is_finish);
    }
    return sides;
  };
  constexpr size_t kFew = 100;
  constexpr size_t kMany = kSlotBytes * 12 + 3;
  for (const size_t num_bytes : {kFew, kMany}) {
    for (const int rank : {0, 1}) {
      world.engine(rank).devices()->Reserve(rank, kHandle, num_bytes, 2);
    }
  }
  for (const size_t num_bytes : {kFew, kMany, kFew}) {
    for (int round = 0; round < 2; ++round) {
      std::deque<Side> starts = of_handle({0, 1}, num_bytes, false);
      RunSides(world, starts);
      EXPECT_TRUE(starts[0].IsFrom(0) && starts[1].IsFrom(1));
      for (Side& side : starts) side.operand.assign(num_bytes, std::byte{9});  // donated
      for (int64_t index = 1; index < 4; ++index) {
        ExpectSwap(world, kSlotBytes * 5, index);
      }
      std::deque<Side> own = of_handle({0, 0, 1, 1}, num_bytes, true);
      std::deque<Side> others = of_handle(SwapPairs(), num_bytes, true);
      RunSides(world, own);
      RunSides(world, others);
      EXPECT_TRUE(own[0].IsFrom(0) && own[1].IsFrom(1));
      EXPECT_TRUE(others[0].IsFrom(1) && others[1].IsFrom(0));
    }
  }
  EXPECT_TRUE(world.engine(0).devices()->unfinished().empty());
}

// A finish does the whole exchange if this job has not started it.
TEST(DeviceExchangeTest, FinishWithoutStartExchanges) {
  DeviceWorld world(DeviceOptions(2));
  for (const Pairs& pairs : {Pairs{0, 0, 1, 1}, SwapPairs()}) {
    std::deque<Side> sides;
    for (const int rank : {0, 1}) sides.emplace_back(rank, pairs, 5000).OfHandle(7, true);
    RunSides(world, sides);
    const bool is_own = pairs != SwapPairs();
    EXPECT_TRUE(sides[0].IsFrom(is_own ? 0 : 1) && sides[1].IsFrom(is_own ? 1 : 0));
  }
}

TEST(DeviceExchangeTest, FinishesOfDifferentProgramsAreRefused) {
  constexpr size_t kBytes = 5000;
  std::deque<Side> starts;
  DeviceWorld world(DeviceOptions(2));
  for (const int rank : {0, 1}) {
    world.engine(rank).devices()->Reserve(rank, 7, kBytes, 2);
    starts.emplace_back(rank, Pairs{0, 1}, kBytes).OfHandle(7, false).Start(world);
  }
  Side& zero = starts.emplace_back(0, SwapPairs(), kBytes, 1);
  Side& one = starts.emplace_back(1, SwapPairs(), kBytes, 2);
  zero.OfHandle(7, true).Start(world);
  EXPECT_THAT(ThrownText([&] { one.OfHandle(7, true).Start(world); }),
              HasSubstr("PlanMismatchError: [rank 1/2 cpu1] exchange 2 (op 2): rank 0 of process 0 "
                        "(host 0), cpu0 is at exchange 1 (op 1)"));
}

TEST(DeviceExchangeTest, StartThatThePlanHasNoMemoryForIsAnError) {
  DeviceWorld world(DeviceOptions(2));
  EXPECT_THAT(ThrownText([&] { Side(0, {0, 1}, 100).OfHandle(7, false).Start(world); }),
              HasSubstr("exchange 0 (op 0): the plan of this jaxhet.start has no memory for 100"));
}

TEST(DeviceExchangeTest, LogIsUsedAgain) {
  CheckLogIsUsedAgain(kIsThreadSanitized ? "socket" : "verbs");
}

// Some operands lie in other memory, and some sources are late: their exchanges use slots, between
// exchanges that are pulled.
TEST(DeviceExchangeTest, WhatCannotBePulledGoesThroughSlots) {
  DeviceWorld world(DeviceOptions(2, "pulled"));
  const Pairs pairs = {0, 1};
  constexpr size_t kNumBytes = 3 * kSlotBytes + 1;
  std::deque<Side> zeros;
  std::deque<Side> ones;
  uint64_t pulled = 0;
  for (int i = 0; i < 60; ++i) {
    const bool is_elsewhere = i % 3 == 1;
    const bool is_late = i % 4 == 2;
    pulled += is_elsewhere || is_late ? 0 : kNumBytes;
    auto* const memory = is_elsewhere ? std::pmr::new_delete_resource() : OperandMemory();
    zeros.emplace_back(0, pairs, kNumBytes, i, memory);
    ones.emplace_back(1, pairs, kNumBytes, i).Start(world);
    if (is_late) ones.back().Done(world);
    zeros.back().Start(world);
    if (!is_late) ones.back().Done(world);
    zeros.back().Done(world);
  }
  EXPECT_TRUE(world.IsIdleWithin(0, kLong) && world.IsIdleWithin(1, kLong));
  for (const Side& side : ones) EXPECT_TRUE(side.IsFrom(0));
  EXPECT_EQ(world.engine(1).devices()->Stats().at("bytes_zero_copy_received"), pulled);
}

// Sends may wait for slots; the program waits only at a done.
TEST(DeviceExchangeTest, ProgramIsNotHeldByItsSends) {
  for (const size_t num_bytes : {kEagerBytes, kSlotBytes}) {
    DeviceWorld world(DeviceOptions(2));
    std::deque<Side> zeros;
    std::deque<Side> ones;
    constexpr int kCount = 20;  // more than there are slots
    for (int i = 0; i < kCount; ++i) zeros.emplace_back(0, SwapPairs(), num_bytes, i).Start(world);
    EXPECT_TRUE(world.IsIdleWithin(0, kLong));
    for (int i = 0; i < kCount; ++i) ones.emplace_back(1, SwapPairs(), num_bytes, i).Start(world);
    for (const Side& side : zeros) side.Done(world);
    for (const Side& side : ones) side.Done(world);
    EXPECT_TRUE(world.IsIdleWithin(0, kLong) && world.IsIdleWithin(1, kLong));
    for (const Side& side : zeros) EXPECT_TRUE(side.IsFrom(1));
    for (const Side& side : ones) EXPECT_TRUE(side.IsFrom(0));
  }
}

// Times as the watch sees them: from the device's start of the exchange to its end.
TEST(DeviceExchangeTest, ExchangesAreRecordedAndTimed) {
  DeviceWorld world(DeviceOptions(2));
  const auto records = [&] { return world.engine(0).devices()->FlightRecords(); };
  const auto has = [&](FlightState state) {
    return IsWithin(kLong, [&] { return !records().empty() && records().back().state == state; });
  };
  uint32_t word = 0;
  const Group group{ExchangeKind::kAllGather, {0, 1}};
  Side zero(0, group, 1000, 3);
  Side one(1, group, 1000, 3);
  world.device().WaitValue(world.stream(0), &word, 1);
  zero.Start(world);
  zero.Done(world);
  std::this_thread::sleep_for(milliseconds(50));
  EXPECT_TRUE(records().empty());
  std::atomic_ref(word).store(1);
  EXPECT_TRUE(has(FlightState::kStarted));
  std::this_thread::sleep_for(milliseconds(50));
  one.Start(world);
  one.Done(world);
  EXPECT_TRUE(has(FlightState::kCompleted));
  const FlightRecord record = records().back();
  EXPECT_TRUE(record.rank == 0 && record.kind == ExchangeKind::kAllGather);
  EXPECT_TRUE(record.plan == kPlan && record.index == 3 && record.operand_bytes == 1000);
  EXPECT_TRUE((record.group == std::vector{0, 1}));
  EXPECT_GE(record.ended - record.started, milliseconds(50));
  const auto stats = world.engine(0).devices()->Stats();
  EXPECT_EQ(stats.at("exchanges_completed"), uint64_t{1});
  const auto in_flight =
      std::chrono::duration_cast<std::chrono::microseconds>(record.ended - record.started);
  EXPECT_EQ(stats.at("in_flight_us"), static_cast<uint64_t>(in_flight.count()));
  EXPECT_TRUE(world.IsIdleWithin(0, kLong) && world.IsIdleWithin(1, kLong));
}

// An exchange of three ranks.
struct Round {
  int shift;  // a permute's shift; 0: an exchange of a group
  std::deque<Side> sides;
};

Round RandomRound(std::mt19937& random, int64_t index) {
  Round round{.shift = static_cast<int>(random() % 3), .sides = {}};
  Group group{random() % 2 == 0 ? ExchangeKind::kAllGather : ExchangeKind::kAllToAll, {0, 1, 2}};
  std::ranges::shuffle(group.members, random);
  const size_t num_bytes = random() % (random() % 2 == 0 ? kEagerBytes : 3 * kSlotBytes);
  const size_t part_bytes = random() % 2 == 0 ? 0 : num_bytes / (1 + random() % 4);
  Pairs pairs;
  for (int rank = 0; rank < 3; ++rank) pairs.insert(pairs.end(), {rank, (rank + round.shift) % 3});
  for (int rank = 0; rank < 3; ++rank) {
    if (round.shift == 0) {
      round.sides.emplace_back(rank, group, num_bytes, index);
    } else {
      round.sides.emplace_back(rank, pairs, num_bytes, index).InParts(part_bytes);
    }
  }
  return round;
}

// Each rank has dones in an order of its own.
TEST_P(DeviceExchangeTransportsTest, RandomExchangesOfThreeRanks) {
  constexpr int kAtOnce = 11;
  constexpr int kRounds = kAtOnce * (kIsThreadSanitized ? 2 : 7);
  DeviceWorld world(DeviceOptions(3, GetParam()));
  std::mt19937 random(7);  // NOLINT(bugprone-random-generator-seed): a run can be repeated
  std::deque<Round> rounds;
  for (int i = 0; i < kRounds; ++i) rounds.push_back(RandomRound(random, i % kAtOnce));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank, own_random = std::mt19937(random())]() mutable {
      std::vector<const Side*> in_flight;  // each side once for each of its parts
      for (size_t i = 0; i < rounds.size(); ++i) {
        Side& side = rounds[i].sides[static_cast<size_t>(rank)];
        side.Start(world);
        in_flight.insert(in_flight.end(), side.num_parts(), &side);
        if ((i + 1) % kAtOnce != 0) continue;
        std::ranges::shuffle(in_flight, own_random);
        for (const Side* const each : in_flight) each->Done(world);
        in_flight.clear();
      }
      world.device().Synchronize(world.stream(rank));
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& [shift, sides] : rounds) {
    for (int rank = 0; rank < 3; ++rank) {
      const Side& side = sides[static_cast<size_t>(rank)];
      EXPECT_TRUE(shift == 0 ? side.HasAllBlocks() : side.IsFrom((rank + 3 - shift) % 3));
    }
  }
}

TEST_P(DeviceExchangeTransportsTest, CloseWaitsForWhatIsInFlight) {
  DeviceWorld world(DeviceOptions(2, GetParam()));
  Side zero(0, SwapPairs(), kSlotBytes * (kChannelSlots + 1));
  Side one(1, SwapPairs(), kSlotBytes * (kChannelSlots + 1));
  zero.Start(world);
  zero.Done(world);
  std::thread other([&] {
    std::this_thread::sleep_for(milliseconds(100));
    one.Start(world);
    one.Done(world);
    world.engine(1).Close(kLong);
  });
  world.engine(0).Close(kLong);
  other.join();
  EXPECT_TRUE(zero.IsFrom(1) && one.IsFrom(0));
}

struct Needs {
  int32_t threads;
  int32_t fds;
};

// Needs of each rank of a job in which any two ranks exchange data.
Needs NeedsOfRank(int num_ranks, std::string_view transport) {
  WorldOptions options = DeviceOptions(num_ranks, transport);
  options.engine.slot_bytes = 4'096;
  const Needs before{CountThreads(), CountFds()};
  DeviceWorld world(options);
  std::vector<int64_t> members;
  for (int rank = 0; rank < num_ranks; ++rank) members.push_back(rank);
  std::deque<Side> sides;
  for (int rank = 0; rank < num_ranks; ++rank) {
    sides.emplace_back(rank, Group{ExchangeKind::kAllToAll, members}, size_t{10'000});
    sides.back().Start(world);
  }
  for (Side& side : sides) side.Done(world);
  for (int rank = 0; rank < num_ranks; ++rank) {
    EXPECT_TRUE(world.IsIdleWithin(rank, kLong));
    EXPECT_TRUE(sides.at(static_cast<size_t>(rank)).HasAllBlocks());
  }
  return {(CountThreads() - before.threads) / num_ranks, (CountFds() - before.fds) / num_ranks};
}

// Threads do not grow with the job. Descriptors grow by control and the sockets for chunks, which
// the channels of both directions share.
TEST(DeviceExchangeTest, ThreadsAndDescriptorsOfARank) {
  constexpr int kOfPeer = 1 + kLanes;
  const Needs eight = NeedsOfRank(8, "socket");
  const Needs sixteen = NeedsOfRank(16, "socket");
  EXPECT_EQ(eight.threads, NeedsOfRank(8, "host").threads + Proxy::kMostThreads);
  EXPECT_EQ(sixteen.threads, eight.threads);
  EXPECT_EQ(sixteen.fds - eight.fds, 8 * kOfPeer);
  EXPECT_LE(eight.fds, 7 * kOfPeer + int{Proxy::kMostThreads} + 5);
}

// A driver may call streams idle some time after it has done their work.
TEST(DeviceExchangeTest, CloseLeavesNoThreads) {
  const int32_t threads = CountThreads();
  {
    DeviceWorld world(DeviceOptions(2, "socket"));
    Side zero(0, SwapPairs(), kSlotBytes);
    Side one(1, SwapPairs(), kSlotBytes);
    const LateRetirement late(milliseconds(50));
    for (Side* const side : {&zero, &one}) side->Start(world);
    for (const Side* const side : {&zero, &one}) side->Done(world);
    world.engine(0).Close(kLong);
    world.engine(1).Close(kLong);
  }
  EXPECT_EQ(CountThreads(), threads);
}

// A peer may leave as soon as its own side is done: what it has sent is still on its way.
TEST_P(DeviceExchangeTransportsTest, PeerThatLeavesTakesNothingBack) {
  DeviceWorld world(DeviceOptions(2, GetParam()));
  const Pairs pairs = {0, 1};
  Side zero(0, pairs, kSlotBytes * kChannelSlots);
  Side one(1, pairs, kSlotBytes * kChannelSlots);
  zero.Start(world);
  zero.Done(world);
  std::thread leaver([&] { world.engine(0).Close(kLong); });
  std::this_thread::sleep_for(milliseconds(100));
  one.Start(world);
  one.Done(world);
  EXPECT_TRUE(world.IsIdleWithin(1, kLong));
  EXPECT_TRUE(one.IsFrom(0));
  world.engine(1).Close(kLong);
  leaver.join();
  EXPECT_EQ(world.engine(0).failure(), nullptr);
}

// A source may leave before its target has come to its done.
void CheckSourceLeavesABusyTarget(std::string_view transport, size_t num_bytes) {
  DeviceWorld world(DeviceOptions(2, transport));
  const Pairs pairs = {0, 1};
  Side zero(0, pairs, num_bytes);
  Side one(1, pairs, num_bytes);
  one.Start(world);
  zero.Start(world);
  zero.Done(world);
  world.engine(0).Close(kLong);
  EXPECT_EQ(world.engine(0).failure(), nullptr);
  one.Done(world);
  EXPECT_TRUE(world.IsIdleWithin(1, kLong));
  EXPECT_TRUE(one.IsFrom(0));
}

TEST_P(DeviceExchangeTransportsTest, SourceLeavesABusyTarget) {
  CheckSourceLeavesABusyTarget(GetParam(), kEagerBytes);
  // An operand that is pulled is needed until it was.
  if (GetParam() != "pulled") CheckSourceLeavesABusyTarget(GetParam(), kSlotBytes);
}

TEST(DeviceExchangeTest, RefusedTransportsAreNamed) {
  WorldOptions options = DeviceOptions(2);
  options.transports = {"socket"};
  World world(options);
  const std::string text = ThrownText(
      [&] { world.engine(0).OpenDevices(HostVendor(), {{0, 0, {}}}, {}, milliseconds(500)); });
  EXPECT_THAT(text, HasSubstr("no transport leads from rank 1 of process 1"));
  EXPECT_THAT(text, HasSubstr("cuda_ipc: not allowed (option transports)"));
  EXPECT_THAT(ThrownText([&] { (void)world.engine(0).devices(); }), HasSubstr("are not open"));
}

TEST(DeviceExchangeTest, MissingProcessIsNamed) {
  World world(DeviceOptions(2));
  const std::string text = ThrownText(
      [&] { world.engine(0).OpenDevices(HostVendor(), {{0, 0, {}}}, {}, milliseconds(200)); });
  EXPECT_THAT(
      text,
      HasSubstr(
          "DeadlineError: rank 1 of process 1 (host 1), cpu1 has not opened a device channel"));
}

}  // namespace
}  // namespace jaxhet::testing
