#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <deque>
#include <thread>

#include "tests/cpp/device_world.h"
#include "tests/cpp/host_device.h"
#include "tests/cpp/testing.h"
#include "xla_plugin/base/error.h"

// Failures of exchanges between devices: the texts of their errors, and what programs see.
namespace jaxhet::testing {
namespace {

using ::testing::HasSubstr;

using std::chrono::milliseconds;

class DeviceFaultTransportsTest : public DeviceTransportsTest {};

INSTANTIATE_TEST_SUITE_P(Transports, DeviceFaultTransportsTest,
                         ::testing::ValuesIn(TestedTransports()), &NameOfParam);

// The result of the first exchange is poisoned.
void CheckDifferentExchanges(std::string_view transport, size_t num_bytes) {
  DeviceWorld world(DeviceOptions(2, transport));
  Side zero(0, SwapPairs(), num_bytes, 2);
  Side one(1, SwapPairs(), num_bytes, 3);
  zero.Start(world);
  zero.Done(world);
  const std::string text = ThrownText([&] { one.Start(world); });
  const bool second_finds_it =
      text.find("[rank 1/2 cpu1] exchange 3 (op 3): rank 0") != std::string::npos;
  EXPECT_THAT(text, HasSubstr("PlanMismatchError: [rank "));
  EXPECT_THAT(text,
              HasSubstr(second_finds_it ? "is at exchange 2 (op 2)" : "is at exchange 3 (op 3)"));
  EXPECT_TRUE(world.IsIdleWithin(0, kLong));
  EXPECT_TRUE(zero.IsFilledWith(kPoison));
  EXPECT_THAT(ThrownText([&] { zero.Start(world); }), HasSubstr("PlanMismatchError"));
}

TEST(DeviceFaultTest, DifferentExchangesAreAPlanMismatch) {
  CheckDifferentExchanges("host", 1000);
  CheckDifferentExchanges("pulled", kSlotBytes);
}

// Over sockets the difference is found when the chunk arrives.
TEST(DeviceFaultTest, DifferentExchangesOverSocketsAreAPlanMismatch) {
  DeviceWorld world(DeviceOptions(2, "socket"));
  Side zero(0, SwapPairs(), 1000, 2);
  Side one(1, SwapPairs(), 1000, 3);
  zero.Start(world);
  zero.Done(world);
  try {
    one.Start(world);
    one.Done(world);
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("PlanMismatchError"));
  }
  EXPECT_TRUE(world.IsIdleWithin(0, kLong) && world.IsIdleWithin(1, kLong));
  EXPECT_TRUE(zero.IsFilledWith(kPoison) && !one.IsFrom(0));
  EXPECT_THAT(ThrownText([&] { zero.Start(world); }), HasSubstr("PlanMismatchError"));
}

TEST(DeviceFaultTest, BetterTransportsSayWhyTheyAreNotUsed) {
  DeviceWorld world(DeviceOptions(2, "socket"));
  std::vector<std::string> names;
  for (const PeerCounts& channel : world.engine(0).devices()->Counts()) {
    EXPECT_EQ(channel.transport, "socket");
    for (const auto& [name, reason] : channel.refusals) {
      names.push_back(name);
      const bool is_local = name == "local";
      EXPECT_THAT(reason, HasSubstr(is_local ? "process" : "not allowed (option transports)"));
    }
  }
  EXPECT_THAT(names, ::testing::ElementsAre("local", "cuda_ipc", "hip_ipc", "host", "verbs"));
}

// An idle proxy sleeps. It does not poll, not even with pauses.
TEST_P(DeviceFaultTransportsTest, ThreadsSleepWhenIdle) {
  DeviceWorld world(DeviceOptions(2, GetParam()));
  ExpectSwap(world, kSlotBytes * 20);
  EXPECT_LT(IdleCpuMs(), 40);
}

TEST_P(DeviceFaultTransportsTest, LatePeerIsADeadlineError) {
  const std::string_view transport = GetParam();
  WorldOptions options = DeviceOptions(2, transport);
  options.engine.deadline_ms = options.engine.first_deadline_ms = 300;
  DeviceWorld world(options);
  Side zero(0, SwapPairs(), kSlotBytes * 20);
  zero.Start(world);
  zero.Done(world);
  EXPECT_TRUE(world.IsIdleWithin(0, kLong));
  EXPECT_TRUE(zero.IsFilledWith(kPoison));
  const auto failure = world.engine(0).failure();
  ASSERT_NE(failure, nullptr);
  EXPECT_THAT(failure->what(),
              HasSubstr("DeadlineError: [rank 0/2 cpu0] exchange 0 (op 0): rank 1"));
  EXPECT_THAT(failure->what(), HasSubstr("has not started it within"));
  EXPECT_THAT(failure->what(), HasSubstr("it has started none so far"));
}

// The program waits for the second exchange first. The first one has arrived, and stays in flight.
void CheckLatePeerBehindAnArrivedExchange(std::string_view transport, size_t num_bytes,
                                          bool has_done) {
  DeviceWorld world(DeviceOptions(2, transport));
  Side first(0, SwapPairs(), num_bytes, 0);
  Side peer(1, SwapPairs(), num_bytes, 0);
  Side second(0, SwapPairs(), num_bytes, 1);
  first.Start(world);
  peer.Start(world);
  second.WithDeadline(milliseconds(300)).Start(world);
  second.Done(world);
  if (has_done) first.Done(world);
  ASSERT_TRUE(IsWithin(kLong, [&] { return world.engine(0).failure() != nullptr; }));
  EXPECT_THAT(world.engine(0).failure()->what(),
              HasSubstr("DeadlineError: [rank 0/2 cpu0] exchange 1 (op 1): rank 1"));
  if (!has_done) {
    EXPECT_THAT(ThrownText([&] { first.Done(world); }), HasSubstr("DeadlineError"));
  }
  try {
    peer.Done(world);
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("DeadlineError"));
  }
  EXPECT_TRUE(world.IsIdleWithin(0, kLong) && world.IsIdleWithin(1, kLong));
  EXPECT_TRUE(second.IsFilledWith(kPoison));
}

TEST_P(DeviceFaultTransportsTest, LatePeerBehindAnArrivedExchangeIsADeadlineError) {
  for (const size_t num_bytes : {kEagerBytes, kSlotBytes * 2}) {
    for (const bool has_done : {true, false}) {
      CheckLatePeerBehindAnArrivedExchange(GetParam(), num_bytes, has_done);
    }
  }
}

// Before its start, the memory of a result belongs to other data.
TEST(DeviceFaultTest, NothingIsPoisonedBeforeItsStart) {
  DeviceWorld world(DeviceOptions(2, "pulled"));
  uint32_t word = 0;
  Side zero(0, SwapPairs(), kSlotBytes);
  const std::byte before = zero.result[0];
  world.device().WaitValue(world.stream(0), &word, 1);
  zero.Start(world);
  world.engine(0).Fail(Error(ErrorCode::kPeer, "process 1 has died", 1));
  std::this_thread::sleep_for(milliseconds(600));
  EXPECT_TRUE(zero.IsFilledWith(before));
  std::atomic_ref(word).store(1);
  EXPECT_THAT(ThrownText([&] { zero.Done(world); }), HasSubstr("PeerError: process 1 has died"));
  EXPECT_TRUE(zero.IsFilledWith(kPoison));
  EXPECT_TRUE(world.IsIdleWithin(0, kLong));
}

// Parts that arrived before the job failed are right; later ones are poison.
TEST(DeviceFaultTest, PartsAreRightOrPoison) {
  DeviceWorld world(DeviceOptions(2, "pulled"));
  constexpr size_t kPartBytes = size_t{1} << 20;
  constexpr size_t kParts = kIsThreadSanitized ? 16 : 64;
  Side zero(0, SwapPairs(), kPartBytes * kParts);
  Side one(1, SwapPairs(), kPartBytes * kParts);
  for (Side* const side : {&zero, &one}) side->InParts(kPartBytes).Start(world);
  std::vector<std::byte> seen(kPartBytes);
  for (size_t i = 0; i < kParts; ++i) zero.Done(world);
  one.Done(world);
  world.device().Copy(world.stream(1), seen.data(), one.result.data(), kPartBytes);
  world.device().Synchronize(world.stream(1));
  EXPECT_TRUE(std::ranges::equal(seen, std::span(zero.operand).first(kPartBytes)));
  world.engine(1).Fail(Error(ErrorCode::kPeer, "process 0 has died", 0));
  EXPECT_THAT(ThrownText([&] { one.Done(world); }), HasSubstr("PeerError: process 0 has died"));
  EXPECT_TRUE(world.IsIdleWithin(0, kLong) && world.IsIdleWithin(1, kLong));
  size_t num_right = 0;
  for (size_t i = 0; i < kParts; ++i) {
    const auto part = std::span(one.result).subspan(i * kPartBytes, kPartBytes);
    const bool is_right =
        std::ranges::equal(part, std::span(zero.operand).subspan(i * kPartBytes, kPartBytes));
    num_right += is_right ? 1 : 0;
    EXPECT_TRUE(is_right ? num_right == i + 1
                         : std::ranges::count(part, kPoison) == std::ssize(part));
  }
  EXPECT_GT(num_right, 0);
}

// The block of a member that has sent is right; the block of one that has not is poison.
TEST(DeviceFaultTest, LateMemberOfAGroupIsNamed) {
  for (const size_t num_bytes : {kEagerBytes, kSlotBytes * 3}) {
    WorldOptions options = DeviceOptions(3, "pulled");
    options.engine.deadline_ms = options.engine.first_deadline_ms = 300;
    DeviceWorld world(options);
    const Group group{ExchangeKind::kAllGather, {0, 1, 2}};
    Side zero(0, group, num_bytes);
    Side one(1, group, num_bytes);
    zero.Start(world);
    one.Start(world);
    zero.Done(world);
    one.Done(world);
    EXPECT_TRUE(world.IsIdleWithin(0, kLong) && world.IsIdleWithin(1, kLong));
    EXPECT_TRUE(zero.HasBlockOf(0) && one.HasBlockOf(1));
    const auto of_two = std::span(zero.result).last(num_bytes);
    EXPECT_EQ(std::ranges::count(of_two, kPoison), std::ssize(of_two));
    const auto failure = world.engine(0).failure();
    ASSERT_NE(failure, nullptr);
    EXPECT_THAT(failure->what(), HasSubstr("(op 0): rank 2"));
    EXPECT_THAT(failure->what(), HasSubstr("has not started it within"));
  }
}

// The time counts from when the device reaches the exchange, and then its done: the program may be
// busy before the start, or between the two.
void CheckBusyProgramIsNotLate(size_t num_bytes, bool is_busy_before_start) {
  WorldOptions options = DeviceOptions(2);
  options.engine.deadline_ms = options.engine.first_deadline_ms = 400;
  DeviceWorld world(options);
  uint32_t word = 0;
  const auto be_busy = [&] {
    for (const int rank : {0, 1}) world.device().WaitValue(world.stream(rank), &word, 1);
  };
  if (is_busy_before_start) be_busy();
  std::deque<Side> sides;
  for (const int rank : {0, 1}) sides.emplace_back(rank, SwapPairs(), num_bytes).Start(world);
  if (!is_busy_before_start) {
    std::this_thread::sleep_for(milliseconds(600));
    be_busy();
  }
  for (const Side& side : sides) side.Done(world);
  std::this_thread::sleep_for(milliseconds(600));
  EXPECT_EQ(world.engine(0).failure(), nullptr);
  std::atomic_ref(word).store(1);
  EXPECT_TRUE(world.IsIdleWithin(0, kLong) && world.IsIdleWithin(1, kLong));
  EXPECT_TRUE(sides[0].IsFrom(1) && sides[1].IsFrom(0));
}

TEST(DeviceFaultTest, BusyProgramIsNotLate) {
  for (const size_t num_bytes : {kEagerBytes, kSlotBytes}) {
    for (const bool before : {true, false}) CheckBusyProgramIsNotLate(num_bytes, before);
  }
}

// A missing result is poisoned before the program continues; a result that arrived stays. The
// last exchange has no done yet; the dones of the others may have another order.
void CheckFailurePoisonsWhatIsInFlight(std::string_view transport, size_t num_bytes) {
  DeviceWorld world(DeviceOptions(2, transport));
  Side first(0, SwapPairs(), 5000, 0);
  Side peer(1, SwapPairs(), 5000, 0);
  first.Start(world);
  first.Done(world);
  peer.Start(world);
  peer.Done(world);
  EXPECT_TRUE(world.IsIdleWithin(0, kLong) && world.IsIdleWithin(1, kLong));
  std::deque<Side> sides;
  for (int i = 0; i < 5; ++i) sides.emplace_back(0, SwapPairs(), num_bytes, 1 + i).Start(world);
  std::deque<std::vector<std::byte>> seen;  // by the program, as it goes on
  for (const size_t i : {2U, 0U, 3U, 1U}) {
    sides[i].Done(world);
    auto* const to = seen.emplace_back(num_bytes).data();
    world.device().Copy(world.stream(0), to, sides[i].result.data(), num_bytes);
  }
  const auto records = [&] { return world.engine(0).devices()->FlightRecords(); };
  EXPECT_TRUE(IsWithin(kLong, [&] { return records().size() == 1 + sides.size(); }));
  world.engine(0).Fail(Error(ErrorCode::kPeer, "process 1 has died", 1));
  EXPECT_TRUE(IsWithin(kLong, [&] { return world.engine(0).failure() != nullptr; }));
  EXPECT_THAT(ThrownText([&] { sides[4].Done(world); }),
              HasSubstr("PeerError: process 1 has died"));
  EXPECT_TRUE(world.IsIdleWithin(0, kLong));
  EXPECT_TRUE(first.IsFrom(1));
  for (const Side& side : sides) EXPECT_TRUE(side.IsFilledWith(kPoison));
  const std::vector poison(num_bytes, kPoison);
  for (const auto& result : seen) EXPECT_TRUE(AreEqual(result, poison));
  const auto failed = records();
  EXPECT_EQ(std::ranges::count(failed, FlightState::kFailed, &FlightRecord::state),
            std::ssize(sides));
  EXPECT_THAT(ThrownText([&] { first.Start(world); }), HasSubstr("PeerError: process 1 has died"));
}

TEST_P(DeviceFaultTransportsTest, FailurePoisonsWhatIsInFlight) {
  for (const size_t num_bytes : {kEagerBytes, kSlotBytes * 3})
    CheckFailurePoisonsWhatIsInFlight(GetParam(), num_bytes);
}

TEST_P(DeviceFaultTransportsTest, PeerThatLeftIsNamed) {
  DeviceWorld world(DeviceOptions(2, GetParam()));
  world.engine(1).Close(kLong);
  Side zero(0, SwapPairs(), 1000);
  zero.Start(world);
  zero.Done(world);
  EXPECT_TRUE(world.IsIdleWithin(0, kFaultTimeoutMs * milliseconds(5)));
  const auto failure = world.engine(0).failure();
  ASSERT_NE(failure, nullptr);
  EXPECT_THAT(failure->what(), HasSubstr("PeerError: [rank 0/2 cpu0] exchange 0 (op 0): rank 1"));
  EXPECT_THAT(failure->what(), HasSubstr("process 1 (host 1) has left the job"));
  EXPECT_TRUE(zero.IsFilledWith(kPoison));
}

// The data of a peer that has left waits behind an exchange whose source never starts it.
TEST(DeviceFaultTest, PeerThatLeftIsNotBlamedForAnother) {
  WorldOptions options = DeviceOptions(3);
  options.engine.deadline_ms = options.engine.first_deadline_ms = 2'000;
  DeviceWorld world(options);
  Side missed(0, {1, 0}, kSlotBytes, 0);
  Side behind(0, {2, 0}, kSlotBytes, 1);
  missed.Start(world);
  behind.Start(world);
  missed.Done(world);
  behind.Done(world);
  Side left(2, {2, 0}, kSlotBytes, 1);
  left.Start(world);
  left.Done(world);
  world.engine(2).Close(milliseconds(200));
  ASSERT_TRUE(IsWithin(kLong, [&] { return world.engine(0).failure() != nullptr; }));
  EXPECT_THAT(world.engine(0).failure()->what(),
              HasSubstr("DeadlineError: [rank 0/3 cpu0] exchange 0 (op 0): rank 1"));
  EXPECT_TRUE(world.IsIdleWithin(0, kLong));
}

// A source that fails lets its sends go over slots that the target has not taken: the target must
// not take that for the exchange.
TEST_P(DeviceFaultTransportsTest, FailedSourceDoesNotCorruptItsTarget) {
  DeviceWorld world(DeviceOptions(2, GetParam()));
  constexpr int kCount = 12;  // more than there are slots
  std::deque<Side> zeros;
  for (int i = 0; i < kCount; ++i) {
    zeros.emplace_back(0, SwapPairs(), kSlotBytes, i % 8).Start(world);
    zeros.back().Done(world);
  }
  world.engine(0).Fail(Error(ErrorCode::kPeer, "something else", 0));
  EXPECT_TRUE(world.IsIdleWithin(0, kLong));
  Side one(1, SwapPairs(), kSlotBytes, 0);
  try {
    one.Start(world);
    one.Done(world);
  } catch (const Error&) {
    return;  // it knows already
  }
  EXPECT_TRUE(world.IsIdleWithin(1, kLong));
  EXPECT_TRUE(one.IsFilledWith(kPoison));
}

// The done of the second transfer waits for rank 1 when the job fails. What the done of the first
// one has put together must reach the streams, or their end is waited for in vain, for 20 s.
TEST(DeviceFaultTest, FailureInTheMiddleOfADoneEndsAtOnce) {
  const Group all{.kind = ExchangeKind::kAllGather, .members = {0, 1, 2}};
  for (int repeat = 0; repeat < 3; ++repeat) {
    Side zero(0, all, kSlotBytes);
    Side two(2, all, kSlotBytes);  // poisoned when the world ends
    DeviceWorld world(DeviceOptions(3, "pulled"));
    two.Start(world);
    zero.Start(world);
    const Time begin = Clock::now();
    std::thread failing([&] {
      std::this_thread::sleep_for(milliseconds(1));
      world.engine(0).Fail(Error(ErrorCode::kPeer, "process 1 has died", 1));
      ThrownText([&] { world.engine(0).devices()->Done(0, DeviceRequest{}); });
    });
    try {
      zero.Done(world);
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("process 1 has died"));
    }
    failing.join();
    EXPECT_TRUE(world.IsIdleWithin(0, kLong));
    EXPECT_LT(Clock::now() - begin, milliseconds(10'000));
  }
}

// Process 1, which has rank 1, in a process of its own: starts nothing. Rank 0 is here.
struct ForkedRank {
  explicit ForkedRank(const WorldOptions& options)
      : has_operands(options.has_operands),
        ends(ConnectAll(2, kChannelSockets)),
        peer(options, [this](Engine& engine) {
          ends[0].clear();
          OpenDevices(engine, 1);
          return WaitForEver(engine);
        }) {
    ends[1].clear();
    channel_socket = Fd(dup(ends[0][1].data[1].get()));
    SetUpEngine(peer.engine(), options);
    OpenDevices(peer.engine(), 0);
  }

  void OpenDevices(Engine& engine, int rank) {
    auto sockets = ChannelSocketsOf(rank, std::move(ends[static_cast<size_t>(rank)]));
    const auto operands = has_operands ? OperandsOf(rank) : std::span<std::byte>{};
    engine.OpenDevices(HostVendor(), {{rank, 0, operands}}, std::move(sockets), kLong);
  }

  bool has_operands;
  std::vector<std::vector<Ends>> ends;
  ForkedPeer peer;
  Fd channel_socket;  // one of those for chunks, of rank 0
  std::unique_ptr<Device> device = OpenHostDevice();
  Stream stream = device->CreateStream(StreamPriority::kNormal);
};

WorldOptions ImpatientOptions(std::string_view transport) {
  WorldOptions options = DeviceOptions(2, transport);
  options.engine.peer_timeout_ms = kFaultTimeoutMs;
  return options;
}

// Exchanges 3 to 5, which wait for the peer.
void StartThree(ForkedRank& forked, std::deque<Side>& sides) {
  for (int64_t index = 3; index < 6; ++index) {
    Side& side = sides.emplace_back(0, SwapPairs(), 20 * kSlotBytes, index);
    side.StartOn(forked.peer.engine(), forked.stream.get());
    side.DoneOn(forked.peer.engine(), forked.stream.get());
  }
}

void ExpectPeerError(ForkedRank& forked, std::string_view words,
                     const Location& location = Location::current()) {
  const CalledAt here(location);
  const auto error = forked.peer.engine().WaitFailure(kLong);
  ASSERT_NE(error, nullptr);
  EXPECT_THAT(error->what(),
              HasSubstr("jaxhet.PeerError: [rank 0/2 cpu0] exchange 3 (op 3): rank 1 of process 1 "
                        "(host 1), cpu1: the process has died or can't be reached: "));
  EXPECT_THAT(error->what(), HasSubstr(words));
  EXPECT_TRUE(IsWithin(kLong, [&] { return forked.device->IsIdle(forked.stream.get()); }));
}

void CheckReportsPeer(std::string_view transport, int signal, std::string_view words) {
  std::deque<Side> sides;
  ForkedRank forked(ImpatientOptions(transport));
  StartThree(forked, sides);
  forked.peer.Kill(signal);
  ExpectPeerError(forked, words);
  for (const Side& side : sides) EXPECT_TRUE(side.IsFilledWith(kPoison));
}

TEST_P(DeviceFaultTransportsTest, DeadPeerIsNamedWithTheExchange) {
  CheckReportsPeer(GetParam(), SIGKILL, "Look at what that process printed last");
}

TEST(DeviceFaultTest, SilentPeerIsNamedWithTheExchange) {
  CheckReportsPeer("host", SIGSTOP, "it has been silent for");
}

// The control connection stands.
TEST(DeviceFaultTest, BrokenChannelIsNamedWithTheExchange) {
  std::deque<Side> sides;
  ForkedRank forked(ImpatientOptions("socket"));
  shutdown(forked.channel_socket.get(), SHUT_RDWR);
  try {
    StartThree(forked, sides);
  } catch (const Error& error) {  // by the second one it may be known
    EXPECT_THAT(error.what(), HasSubstr("PeerError"));
  }
  ExpectPeerError(forked, "a device channel (socket) broke: ");
}

// Bytes that somebody on the way puts into a channel's connection; the control connection stands.
TEST(DeviceFaultTest, ForgedChannelIsNamedWithTheExchange) {
  for (const std::string_view forged :
       {std::string_view("\x04\0\0\0 forged", 11), std::string_view("\xff\xff\xff")}) {
    ForkedRank forked(ImpatientOptions("sealed"));
    std::string bytes(forged);
    bytes.resize(100, 'x');
    EXPECT_TRUE(
        std::cmp_equal(write(forked.channel_socket.get(), bytes.data(), bytes.size()), 100));
    const auto error = forked.peer.engine().WaitFailure(kLong);
    ASSERT_NE(error, nullptr);
    EXPECT_THAT(error->what(), HasSubstr("a device channel (socket) broke: "));
    EXPECT_THAT(error->what(), HasSubstr("record"));
  }
}

// Ranks of this process, and channels between the last one and each of the others.
struct LocalRanks {
  explicit LocalRanks(int num_ranks) {
    for (int rank = 0; rank < num_ranks; ++rank) {
      ranks.push_back(std::make_unique<DeviceRank>(rank, OpenHostDevice(), kEagerBytes));
    }
    for (int rank = 0; rank + 1 < num_ranks; ++rank) {
      Connect(rank, num_ranks - 1);
      Connect(num_ranks - 1, rank);
    }
  }
  void Connect(int source, int target) {
    const DeviceTransport& local = DeviceTransportOf("local");
    const auto setup = [&](int rank) -> ChannelSetup {
      return {.device = Rank(rank).device(),
              .same_process = true,
              .same_host = true,
              .same_vendor = true,
              .slot_bytes = kSlotBytes,
              .pull_bytes = 0,
              .operands = {},
              .lanes = {},
              .nics = nullptr};
    };
    auto [end, offer] = local.make(setup(target));
    Rank(source).channels().Add(target, false, ChannelOf(local.open(setup(source), offer)));
    Rank(target).channels().Add(source, true, ChannelOf(std::move(end)));
  }
  static std::unique_ptr<RankChannel> ChannelOf(std::unique_ptr<DeviceChannel> end) {
    auto channel = std::make_unique<RankChannel>();
    channel->end = std::move(end);
    channel->transport = "local";
    return channel;
  }
  DeviceRank& Rank(int rank) { return *ranks.at(static_cast<size_t>(rank)); }

  std::vector<std::unique_ptr<DeviceRank>> ranks;
};

// The proof in the operands' allocation is lost, and the one in the slots is not.
TEST(DeviceFaultTest, MemoryThatTheTargetDoesNotSeeIsNotPulledFrom) {
  const auto device = OpenHostDevice();
  const DeviceTransport& host = DeviceTransportOf("host");
  const auto setup = [&](int rank) -> ChannelSetup {
    return {.device = *device,
            .same_process = false,
            .same_host = true,
            .same_vendor = true,
            .slot_bytes = kSlotBytes,
            .pull_bytes = 1,
            .operands = OperandsOf(rank),
            .lanes = {},
            .nics = nullptr};
  };
  auto [target, offer] = host.make(setup(1));
  const auto source = host.open(setup(0), offer);
  target->Accept(source->Answer());
  const std::vector<std::byte> proof(kProofBytes, std::byte{7});
  source->Prove(*device, proof);
  std::ranges::fill(OperandsOf(0), std::byte{});
  EXPECT_TRUE(target->IsProven(*device, proof));
  EXPECT_THAT(
      target->Remark(),
      HasSubstr("the target's device does not see the source's writes in the mapped memory"));
}

// A thread may start an exchange while the watch abandons those that it knows of.
TEST(DeviceFaultTest, WhatStartsLateIsAbandonedToo) {
  std::vector<std::byte> operand(kSlotBytes * 20);
  std::vector<std::byte> result(operand.size());
  LocalRanks pair(2);
  const Stream stream = pair.Rank(0).device().CreateStream(StreamPriority::kNormal);
  pair.Rank(0).watch().Stop();
  EXPECT_TRUE(pair.Rank(0).watch().Abandon(kLong));
  DeviceRequest request;
  request.stream = stream.get();
  request.kind = ExchangeKind::kPermute;
  request.plan = kPlan;
  request.pairs = {{0, 1}, {1, 0}};
  request.operand = operand;
  request.result = result;
  request.poison = kPoison;
  EXPECT_FALSE(pair.Rank(0).Start(request));
  EXPECT_TRUE(pair.Rank(0).watch().Abandon(kLong));
  EXPECT_TRUE(std::ranges::all_of(result, [](std::byte byte) { return byte == kPoison; }));
}

// A job that has failed.
class FailedJob final : public QuietJob {
 public:
  std::shared_ptr<const Error> failure() const override { return failure_; }

 private:
  std::shared_ptr<const Error> failure_ =
      std::make_shared<const Error>(ErrorCode::kPeer, "process 1 has died", 1);
};

// Programs of several ranks of a process meet between two exchanges, as in a collective of NCCL.
// The first program takes long between its exchanges, which holds up nobody else.
TEST(DeviceFaultTest, RanksOfAProcessAreLetGoInTurn) {
  constexpr int kRanks = 4;
  LocalRanks all(kRanks + 1);
  const auto peer = std::move(all.ranks.back());  // starts nothing
  all.ranks.pop_back();
  std::array<uint32_t, kRanks> has_come{};
  uint32_t go_on = 0;
  std::vector<std::byte> operand(kSlotBytes);
  std::deque<std::vector<std::byte>> results;
  const auto device = OpenHostDevice();
  std::deque<Stream> streams;
  for (int rank = 0; rank < kRanks; ++rank) {
    DeviceRank& own = all.Rank(rank);
    auto* const stream = streams.emplace_back(device->CreateStream({})).get();
    for (int64_t index = 0; index < 3; ++index) {
      DeviceRequest request;
      request.stream = stream;
      request.plan = kPlan;
      request.index = index;
      request.rank = rank;
      request.kind = ExchangeKind::kPermute;
      request.pairs = {{rank, kRanks}, {kRanks, rank}};
      request.operand = operand;
      request.result = results.emplace_back(kSlotBytes);
      request.poison = kPoison;
      EXPECT_FALSE(own.Start(request));
      own.Done(stream, kPlan, index);
      if (index == 0) {
        device->WriteValue(stream, &has_come.at(static_cast<size_t>(rank)), 1);
        for (uint32_t& other : has_come) device->WaitValue(stream, &other, 1);
      }
      if (index == 1 && rank == 0) device->WaitValue(stream, &go_on, 1);
    }
  }
  FailedJob job;
  DeviceEngine engine(job, EngineOptions(), std::move(all.ranks));  // whose watch abandons all
  const auto is_idle = [&](const Stream& stream) { return device->IsIdle(stream.get()); };
  const auto are_others_idle = [&] {
    return std::all_of(streams.begin() + 1, streams.end(), is_idle);
  };
  EXPECT_TRUE(IsWithin(kLong / 2, are_others_idle));
  EXPECT_FALSE(is_idle(streams.front()));
  std::atomic_ref(go_on).store(1);
  EXPECT_TRUE(IsWithin(kLong / 2, [&] { return is_idle(streams.front()); }));
  const std::vector poison(kSlotBytes, kPoison);
  for (const auto& result : results) EXPECT_TRUE(AreEqual(result, poison));
}

}  // namespace
}  // namespace jaxhet::testing
