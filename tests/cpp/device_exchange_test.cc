#include <algorithm>
#include <array>
#include <deque>
#include <random>
#include <thread>

#include "tests/cpp/device_world.h"
#include "tests/cpp/testing.h"

// Exchanges between devices, on the device that every machine has: the host's memory.
namespace jaxhet::testing {
namespace {

using std::chrono::milliseconds;

constexpr std::array kTransports = {"shm", "verbs", "tcp"};

WorldOptions Options(int num_processes, std::string_view transport = "shm") {
  WorldOptions options{.num_processes = num_processes,
                       .transports = {std::string(transport), "tcp"}};
  options.engine.slot_bytes = kSlotBytes;
  return options;
}

void CheckSwapsAnySize(std::string_view transport) {
  DeviceWorld world(Options(2, transport));
  for (const size_t num_bytes :
       {size_t{0}, size_t{1}, size_t{7}, kSlotBytes - 1, kSlotBytes, kSlotBytes + 1, kSlotBytes * 8,
        kSlotBytes * 8 + 1, kSlotBytes * 27 + 5}) {
    Part zero(0, SwapPairs(), num_bytes);
    Part one(1, SwapPairs(), num_bytes);
    zero.Start(world);
    one.Start(world);
    zero.Done(world);
    one.Done(world);
    world.device().Synchronize(world.stream(0));
    world.device().Synchronize(world.stream(1));
    EXPECT(zero.IsFrom(1) && one.IsFrom(0));
  }
}

TEST(SwapsAnySize) {
  for (const char* const transport : kTransports) CheckSwapsAnySize(transport);
}

TEST(NoSourceIsZeros) {
  DeviceWorld world(Options(3));
  const Pairs pairs = {0, 1, 1, 2};
  std::deque<Part> parts;
  for (int rank = 0; rank < 3; ++rank) parts.emplace_back(rank, pairs, 1000);
  for (Part& part : parts) part.Start(world);
  for (const Part& part : parts) part.Done(world);
  for (int rank = 0; rank < 3; ++rank) world.device().Synchronize(world.stream(rank));
  EXPECT(parts[0].IsFilledWith(std::byte{0}) && parts[1].IsFrom(0) && parts[2].IsFrom(1));
}

// A result comes whether or not the program has reached its done; more may be in flight than there
// are slots, and the dones may come in another order.
void CheckManyAreInFlight(std::string_view transport) {
  DeviceWorld world(Options(2, transport));
  constexpr int kCount = 40;
  std::deque<Part> zeros;
  std::deque<Part> ones;
  for (int i = 0; i < kCount; ++i) {
    zeros.emplace_back(0, SwapPairs(), kSlotBytes + 3, i).Start(world);
    ones.emplace_back(1, SwapPairs(), kSlotBytes + 3, i).Start(world);
  }
  for (int i = 0; i < kCount; ++i) {
    zeros[static_cast<size_t>(kCount - 1 - i)].Done(world);
    ones[static_cast<size_t>(i)].Done(world);
  }
  world.device().Synchronize(world.stream(0));
  world.device().Synchronize(world.stream(1));
  for (const Part& part : zeros) EXPECT(part.IsFrom(1));
  for (const Part& part : ones) EXPECT(part.IsFrom(0));
  const auto stats = world.engine(0).DeviceStats();
  ExpectEqual(stats.at("exchanges_started"), uint64_t{kCount});
  ExpectEqual(stats.at(StrCat("bytes_sent_", transport)), uint64_t{kCount} * (kSlotBytes + 3));
}

TEST(ManyAreInFlight) {
  for (const char* const transport : kTransports) CheckManyAreInFlight(transport);
}

// As the watch sees it: not before the device comes to it, and until it is over.
TEST(ExchangesAreRecordedAndTimed) {
  DeviceWorld world(Options(2));
  const auto records = [&] { return world.engine(0).DeviceFlightRecords(); };
  const auto has = [&](FlightState state) {
    return IsWithin(kLong, [&] { return !records().empty() && records().back().state == state; });
  };
  uint32_t word = 0;
  Part zero(0, SwapPairs(), 1000, 3);
  Part one(1, SwapPairs(), 1000, 3);
  world.device().WaitValue(world.stream(0), &word, 1);
  zero.Start(world);
  zero.Done(world);
  std::this_thread::sleep_for(milliseconds(50));
  EXPECT(records().empty());
  std::atomic_ref(word).store(1);
  EXPECT(has(FlightState::kStarted));
  std::this_thread::sleep_for(milliseconds(50));
  one.Start(world);
  one.Done(world);
  EXPECT(has(FlightState::kCompleted));
  const FlightRecord record = records().back();
  EXPECT(record.rank == 0 && record.kind == ExchangeKind::kPermute);
  EXPECT(record.plan == kPlan && record.index == 3 && record.operand_bytes == 1000);
  EXPECT((record.group == std::vector{0, 1}));
  EXPECT(record.ended - record.started >= milliseconds(50));
  const auto stats = world.engine(0).DeviceStats();
  ExpectEqual(stats.at("exchanges_completed"), uint64_t{1});
  const auto in_flight =
      std::chrono::duration_cast<std::chrono::microseconds>(record.ended - record.started);
  ExpectEqual(stats.at("in_flight_us"), static_cast<uint64_t>(in_flight.count()));
  EXPECT(world.IsIdleWithin(0, kLong) && world.IsIdleWithin(1, kLong));
}

TEST(FailedExchangesAreRecorded) {
  DeviceWorld world(Options(2));
  Part zero(0, SwapPairs(), 1000);
  zero.Start(world);
  zero.Done(world);
  const auto is_recorded = [&] { return !world.engine(0).DeviceFlightRecords().empty(); };
  EXPECT(IsWithin(kLong, is_recorded));
  world.engine(0).Fail(Error(ErrorCode::kPeer, "process 1 has died", 1));
  EXPECT(world.IsIdleWithin(0, kLong));
  const auto records = world.engine(0).DeviceFlightRecords();
  ExpectEqual(records.size(), size_t{1});
  EXPECT(records.back().state == FlightState::kFailed);
  ExpectEqual(world.engine(0).DeviceStats().at("exchanges_completed"), uint64_t{0});
}

void CheckRandomPermutesOfThreeRanks(std::string_view transport) {
  DeviceWorld world(Options(3, transport));
  std::mt19937 random(7);  // NOLINT(bugprone-random-generator-seed): a run can be repeated
  std::deque<std::deque<Part>> rounds;
  std::vector<std::vector<int>> sources;
  for (int i = 0; i < 150; ++i) {
    const int shift = 1 + static_cast<int>(random() % 2);
    Pairs pairs;
    for (int rank = 0; rank < 3; ++rank) pairs.insert(pairs.end(), {rank, (rank + shift) % 3});
    const size_t num_bytes = random() % (3 * kSlotBytes);
    auto& round = rounds.emplace_back();
    auto& source = sources.emplace_back();
    for (int rank = 0; rank < 3; ++rank) {
      round.emplace_back(rank, pairs, num_bytes, i % 8);
      source.push_back((rank + 3 - shift) % 3);
    }
  }
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      for (auto& round : rounds) {
        round[static_cast<size_t>(rank)].Start(world);
        round[static_cast<size_t>(rank)].Done(world);
      }
      world.device().Synchronize(world.stream(rank));
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 0; i < rounds.size(); ++i) {
    for (size_t rank = 0; rank < 3; ++rank) EXPECT(rounds[i][rank].IsFrom(sources[i][rank]));
  }
}

TEST(RandomPermutesOfThreeRanks) {
  for (const char* const transport : kTransports) CheckRandomPermutesOfThreeRanks(transport);
}

// The rank that comes second finds it, the one that came first has its result poisoned.
TEST(DifferentExchangesAreAPlanMismatch) {
  DeviceWorld world(Options(2));
  Part zero(0, SwapPairs(), 1000, 2);
  Part one(1, SwapPairs(), 1000, 3);
  zero.Start(world);
  zero.Done(world);
  const std::string text = ExpectThrow([&] { one.Start(world); });
  ExpectContains(text, "PlanMismatchError: [rank 1/2 cpu1] exchange 3 (op 3): rank 0");
  ExpectContains(text, "is at exchange 2 (op 2)");
  EXPECT(world.IsIdleWithin(0, kLong));
  EXPECT(zero.IsFilledWith(kPoison));
  ExpectContains(ExpectThrow([&] { zero.Start(world); }), "PlanMismatchError");
}

// Over sockets it is found when the chunk has come.
TEST(DifferentExchangesOverTcpAreAPlanMismatch) {
  DeviceWorld world(Options(2, "tcp"));
  Part zero(0, SwapPairs(), 1000, 2);
  Part one(1, SwapPairs(), 1000, 3);
  zero.Start(world);
  zero.Done(world);
  try {
    one.Start(world);
    one.Done(world);
  } catch (const Error& error) {
    ExpectContains(error.what(), "PlanMismatchError");
  }
  EXPECT(world.IsIdleWithin(0, kLong) && world.IsIdleWithin(1, kLong));
  EXPECT(zero.IsFilledWith(kPoison) && !one.IsFrom(0));
  ExpectContains(ExpectThrow([&] { zero.Start(world); }), "PlanMismatchError");
}

TEST(DifferentProgramsNameTheFirstDifference) {
  DeviceWorld world(Options(2));
  constexpr int64_t kOther = 9;
  world.engine(1).AddPlan(kOther, PlanText(3, "line of its own"));
  Part zero(0, SwapPairs(), 1000);
  Part one(1, SwapPairs(), 1000);
  zero.Start(world);
  zero.Done(world);
  const std::string text = ExpectThrow([&] { one.WithPlan(kOther).Start(world); });
  EXPECT(world.IsIdleWithin(0, kLong));
  ExpectContains(text, "Exchange 2 is the first that differs");
  ExpectContains(text, "line of its own");
}

void CheckLatePeerIsADeadlineError(std::string_view transport) {
  WorldOptions options = Options(2, transport);
  options.engine.deadline_ms = options.engine.first_deadline_ms = 300;
  DeviceWorld world(options);
  Part zero(0, SwapPairs(), kSlotBytes * 20);
  zero.Start(world);
  zero.Done(world);
  EXPECT(world.IsIdleWithin(0, kLong));
  EXPECT(zero.IsFilledWith(kPoison));
  const auto failure = world.engine(0).failure();
  EXPECT(failure != nullptr);
  if (!failure) return;
  ExpectContains(failure->what(), "DeadlineError: [rank 0/2 cpu0] exchange 0 (op 0): rank 1");
  ExpectContains(failure->what(), "has not started it within");
  ExpectContains(failure->what(), "it has started none so far");
}

TEST(LatePeerIsADeadlineError) {
  for (const char* const transport : kTransports) CheckLatePeerIsADeadlineError(transport);
}

// The time counts from when the device reaches the exchange.
TEST(SlowProgramIsNotLate) {
  WorldOptions options = Options(2);
  options.engine.deadline_ms = options.engine.first_deadline_ms = 200;
  DeviceWorld world(options);
  uint32_t word = 0;
  Part zero(0, SwapPairs(), 100);
  Part one(1, SwapPairs(), 100);
  world.device().WaitValue(world.stream(0), &word, 1);
  world.device().WaitValue(world.stream(1), &word, 1);
  zero.Start(world);
  one.Start(world);
  zero.Done(world);
  one.Done(world);
  std::this_thread::sleep_for(milliseconds(600));
  EXPECT(world.engine(0).failure() == nullptr);
  std::atomic_ref(word).store(1);
  EXPECT(world.IsIdleWithin(0, kLong) && world.IsIdleWithin(1, kLong));
  EXPECT(zero.IsFrom(1) && one.IsFrom(0));
}

// Each result that has not come is poisoned before the program goes on; those that have stay.
void CheckFailurePoisonsWhatIsInFlight(std::string_view transport) {
  DeviceWorld world(Options(2, transport));
  Part first(0, SwapPairs(), 5000, 0);
  Part peer(1, SwapPairs(), 5000, 0);
  first.Start(world);
  first.Done(world);
  peer.Start(world);
  peer.Done(world);
  EXPECT(world.IsIdleWithin(0, kLong) && world.IsIdleWithin(1, kLong));
  std::deque<Part> parts;
  for (int i = 0; i < 5; ++i)
    parts.emplace_back(0, SwapPairs(), kSlotBytes * 3, 1 + i).Start(world);
  std::vector<std::byte> seen(parts.back().result.size());
  for (const Part& part : parts) part.Done(world);
  world.device().Copy(world.stream(0), seen.data(), parts.back().result.data(), seen.size());
  world.engine(0).Fail(Error(ErrorCode::kPeer, "process 1 has died", 1));
  EXPECT(world.IsIdleWithin(0, kLong));
  EXPECT(first.IsFrom(1));
  for (const Part& part : parts) EXPECT(part.IsFilledWith(kPoison));
  EXPECT(std::ranges::all_of(seen, [](std::byte byte) { return byte == kPoison; }));
  ExpectContains(ExpectThrow([&] { first.Start(world); }), "PeerError: process 1 has died");
}

TEST(FailurePoisonsWhatIsInFlight) {
  for (const char* const transport : kTransports) CheckFailurePoisonsWhatIsInFlight(transport);
}

// A source that fails lets its sends go over slots that the target has not taken: the target must
// not take that for the exchange.
void CheckFailedSource(std::string_view transport) {
  DeviceWorld world(Options(2, transport));
  constexpr int kCount = 12;  // more than there are slots
  std::deque<Part> zeros;
  for (int i = 0; i < kCount; ++i) {
    zeros.emplace_back(0, SwapPairs(), kSlotBytes, i % 8).Start(world);
    zeros.back().Done(world);
  }
  world.engine(0).Fail(Error(ErrorCode::kPeer, "something else", 0));
  EXPECT(world.IsIdleWithin(0, kLong));
  Part one(1, SwapPairs(), kSlotBytes, 0);
  try {
    one.Start(world);
    one.Done(world);
  } catch (const Error&) {
    return;  // it has heard already
  }
  EXPECT(world.IsIdleWithin(1, kLong));
  EXPECT(one.IsFilledWith(kPoison));
}

TEST(FailedSourceDoesNotCorruptItsTarget) {
  for (const char* const transport : kTransports) CheckFailedSource(transport);
}

void CheckCloseWaitsForWhatIsInFlight(std::string_view transport) {
  DeviceWorld world(Options(2, transport));
  Part zero(0, SwapPairs(), kSlotBytes * 9);
  Part one(1, SwapPairs(), kSlotBytes * 9);
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
  EXPECT(zero.IsFrom(1) && one.IsFrom(0));
}

TEST(CloseWaitsForWhatIsInFlight) {
  for (const char* const transport : kTransports) CheckCloseWaitsForWhatIsInFlight(transport);
}

TEST(RefusedTransportsAreNamed) {
  WorldOptions options = Options(2);
  options.transports = {"tcp"};
  World world(options);
  const std::string text =
      ExpectThrow([&] { world.engine(0).OpenDevices("host", {{0, 0}}, {}, milliseconds(500)); });
  ExpectContains(text, "no transport leads from rank 1 of process 1");
  ExpectContains(text, "cuda_ipc: not allowed (option transports)");
  ExpectContains(ExpectThrow([&] { (void)world.engine(0).devices(); }), "are not open");
}

TEST(MissingProcessIsNamed) {
  World world(Options(2));
  const std::string text =
      ExpectThrow([&] { world.engine(0).OpenDevices("host", {{0, 0}}, {}, milliseconds(200)); });
  ExpectContains(text, "DeadlineError: rank 1 of process 1 (host 1), cpu1 has not opened a ring");
}

}  // namespace
}  // namespace jaxhet::testing
