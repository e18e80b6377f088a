#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <future>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "tests/cpp/testing.h"
#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"
#include "xla_plugin/engine/common/flight_recorder.h"
#include "xla_plugin/engine/common/options.h"
#include "xla_plugin/engine/host/completion_pool.h"
#include "xla_plugin/engine/host/open_exchanges.h"
#include "xla_plugin/engine/host/partition.h"
#include "xla_plugin/transport/device_channel/device_channel.h"
#include "xla_plugin/transport/device_channel/shared_memory.h"

namespace jaxhet::testing {
namespace {

using ::testing::HasSubstr;

TEST(UnitTest, BoundsHoldForAnyValues) {
  EXPECT_TRUE(InBounds(0, 0, 0));
  EXPECT_TRUE(InBounds(3, 4, 7));
  EXPECT_FALSE(InBounds(3, 5, 7));
  EXPECT_FALSE(InBounds(8, 0, 7));
  EXPECT_FALSE(InBounds(4, SIZE_MAX - 1, 7));
  EXPECT_THAT(ThrownText([] { CheckedMultiply(SIZE_MAX / 2, 3); }), HasSubstr("overflows"));
  EXPECT_THAT(ThrownText([] { CheckedCast<int32_t>(int64_t{1} << 40); }),
              HasSubstr("out of range"));
}

TEST(UnitTest, ErrorNamesItsClass) {
  const Error error(ErrorCode::kPeer, "it died", 3);
  EXPECT_STREQ(error.what(), "jaxhet.PeerError: it died");
  EXPECT_EQ(error.text(), "it died");
  EXPECT_EQ(ErrorCodeOf("DeviceError"), ErrorCode::kDevice);
  EXPECT_THAT(ThrownText([] { ErrorCodeOf("OtherError"); }), HasSubstr("UsageError"));
}

TEST(UnitTest, OptionsHaveNoDefaults) {
  EXPECT_THAT(ThrownText([] { ParseOptions({{"chunks", 1}}); }), HasSubstr("called 'chunks'"));
  EXPECT_THAT(ThrownText([] { ParseOptions({{"heartbeat_ms", 1}}); }),
              HasSubstr("the engine option 'chunk_bytes' must be a number"));
}

ExchangeRequest RequestOf(ExchangeKind kind, std::span<std::byte> operand,
                          std::span<std::byte> result) {
  ExchangeRequest request;
  request.rank = 1;
  request.group = {0, 1, 2};
  request.kind = kind;
  request.operands.emplace_back(operand);
  request.results.emplace_back(result);
  return request;
}

TEST(UnitTest, PartitionLeavesBlocksOfLargerGroupsAsTheyAre) {
  std::array<std::byte, 4> operand{};
  std::array<std::byte, 20> result{};
  ExchangeRequest request = RequestOf(ExchangeKind::kAllGather, operand, result);
  request.group_size = 5;
  const auto parts = PartitionBuffers(request);
  EXPECT_EQ(parts.members.size(), size_t{3});
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(parts.members[i].send.num_bytes(), size_t{4});
    EXPECT_EQ(parts.members[i].receive.num_bytes(), size_t{4});
    EXPECT_EQ(parts.members[i].receive.entries()[0].iov_base, &result[i * 4]);
  }
  EXPECT_EQ(parts.padding.num_bytes(), size_t{0});
  request.group_size = 4;
  EXPECT_THAT(ThrownText([&] { PartitionBuffers(request); }),
              HasSubstr("4 x 4 bytes can't fill 20"));
}

TEST(UnitTest, PartitionRefusesSizesThatDoNotFit) {
  std::array<std::byte, 4> operand{};
  std::array<std::byte, 13> result{};
  for (const auto kind : {ExchangeKind::kAllGather, ExchangeKind::kAllToAll}) {
    EXPECT_THAT(ThrownText([&] { PartitionBuffers(RequestOf(kind, operand, result)); }),
                HasSubstr("13"));
  }
  ExchangeRequest permute = RequestOf(ExchangeKind::kPermute, operand, result);
  permute.pairs = {{1, 0}};
  EXPECT_THAT(ThrownText([&] { PartitionBuffers(permute); }),
              HasSubstr("can't turn 4 bytes into 13"));
  const auto unknown = static_cast<ExchangeKind>(std::stoll("9"));  // programs may send any number
  EXPECT_THAT(ThrownText([&] { PartitionBuffers(RequestOf(unknown, operand, operand)); }),
              HasSubstr("kind 9"));
}

TEST(UnitTest, PairsHaveOneSourcePerTarget) {
  const std::array<int64_t, 4> ranks = {4, 0, 4, 2};
  const auto pairs = PairsOf(ranks);
  EXPECT_EQ(pairs[1].source, 4);
  EXPECT_EQ(pairs[1].target, 2);
  EXPECT_EQ(ConnectedTo(2, pairs), (std::vector<int>{0, 2, 4}));
  EXPECT_EQ(ConnectedTo(3, pairs), (std::vector<int>{3}));
  const std::vector<Pair> chain = {{3, 4}, {2, 3}, {1, 2}, {7, 8}};  // from its end to its start
  EXPECT_EQ(ConnectedTo(1, chain), (std::vector<int>{1, 2, 3, 4}));
  EXPECT_EQ(ConnectedTo(8, chain), (std::vector<int>{7, 8}));
  EXPECT_THAT(ThrownText([] { PairsOf(std::array<int64_t, 4>{0, 1, 2, 1}); }),
              HasSubstr("target of two"));
  EXPECT_THAT(ThrownText([] { PairsOf(std::array<int64_t, 3>{0, 1, 2}); }), HasSubstr("3 ranks"));
}

TEST(UnitTest, GroupIsTheOneThatHoldsTheRank) {
  const std::array<int64_t, 6> ranks = {4, 0, 1, 5, 3, 2};
  EXPECT_EQ(GroupOf(ranks, 3, 3), (std::vector<int>{5, 3, 2}));
  EXPECT_THAT(ThrownText([&] { GroupOf(ranks, 3, 6); }), HasSubstr("rank 6 is in no group"));
  EXPECT_THAT(ThrownText([&] { GroupOf(ranks, 4, 1); }), HasSubstr("do not make groups of 4"));
  EXPECT_NE(CommunicatorId(std::array{0, 1}), CommunicatorId(std::array{1, 0}));
  const std::array<int64_t, 6> unequal = {4, 0, 1, 2, -1, -1};
  EXPECT_EQ(GroupOf(unequal, 3, 0), (std::vector<int>{4, 0, 1}));
  EXPECT_EQ(GroupOf(unequal, 3, 2), (std::vector<int>{2}));
}

TEST(UnitTest, FlightRecorderKeepsTheLastExchanges) {
  FlightRecorder recorder;
  for (int64_t id = 0; id < 5000; ++id) {
    FlightRecord record{};
    record.id = id;
    recorder.Started(std::move(record));
  }
  const auto& records = recorder.records();
  EXPECT_EQ(records.size(), size_t{4096});
  EXPECT_EQ(records.front().id, int64_t{904});
  EXPECT_EQ(records.back().id, int64_t{4999});
  recorder.Ended(903, FlightState::kFailed, Time{});
  recorder.Ended(904, FlightState::kCompleted, Time{std::chrono::seconds(1)});
  EXPECT_EQ(records.front().state, FlightState::kCompleted);
  EXPECT_EQ(records.front().ended, Time{std::chrono::seconds(1)});
  EXPECT_EQ(std::ranges::count(records, FlightState::kStarted, &FlightRecord::state),
            ptrdiff_t{4095});
}

TEST(UnitTest, CommunicatorStateCountsRunsAndSequences) {
  CommunicatorState state;
  const auto enter = [&](int64_t run_id, int64_t plan, int64_t index) {
    const auto position = state.Enter(run_id, plan, index);
    return std::pair{position.run, position.sequence};
  };
  EXPECT_EQ(enter(100, 1, 0), std::pair(int64_t{1}, int64_t{0}));
  EXPECT_EQ(enter(100, 1, 5), std::pair(int64_t{1}, int64_t{0}));
  EXPECT_EQ(enter(100, 1, 0), std::pair(int64_t{1}, int64_t{1}));
  EXPECT_EQ(enter(-7, 2, 0), std::pair(int64_t{2}, int64_t{0}));
  EXPECT_THAT(ThrownText([&] { enter(100, 1, 6); }), HasSubstr("two executions of"));
  EXPECT_THAT(ThrownText([&] { enter(-7, 1, 6); }), HasSubstr("two plans"));
}

TEST(UnitTest, SharedMemoryIsFoundByItsInfo) {
  SharedMemory ours(100);
  ours.data()[99] = std::byte{42};
  const SharedMemory theirs(ours.info());
  EXPECT_EQ(theirs.data()[99], std::byte{42});
  SharedMemoryInfo other = ours.info();
  other.nonce[0] ^= 1;
  EXPECT_THAT(ThrownText([&] { const SharedMemory memory(other); }), HasSubstr("another process"));
  other = ours.info();
  other.num_bytes = 5'000'000;
  EXPECT_THAT(ThrownText([&] { const SharedMemory memory(other); }),
              HasSubstr("not the peer's memory"));
  ours.CloseFd();
  EXPECT_THAT(ThrownText([&] { const SharedMemory memory(ours.info()); }),
              HasSubstr("open /proc/"));
  EXPECT_EQ(theirs.data()[99], std::byte{42});
}

TEST(UnitTest, FdsAreLeftInMailboxes) {
  FdMailbox mailbox;
  EXPECT_THAT(ThrownText([&] { mailbox.Take(); }), HasSubstr("no file descriptor from the peer"));
  const SharedMemory memory(100);
  const Fd left(open(StrCat("/proc/self/fd/", memory.info().fd).c_str(), O_RDONLY | O_CLOEXEC));
  FdMailboxInfo guess = mailbox.info();
  guess.nonce[1] ^= 1;
  LeaveFd(guess, Fd(dup(STDIN_FILENO)));  // by one who does not know it: passed over
  LeaveFd(mailbox.info(), left);
  struct stat ours{};
  struct stat theirs{};
  const Fd taken = mailbox.Take();
  EXPECT_TRUE(fstat(left.get(), &ours) == 0 && fstat(taken.get(), &theirs) == 0);
  EXPECT_TRUE(taken.get() != left.get() && ours.st_ino == theirs.st_ino);
  EXPECT_THAT(ThrownText([&] { mailbox.Take(); }), HasSubstr("no file descriptor"));
  const FdMailboxInfo gone = FdMailbox().info();
  EXPECT_THAT(ThrownText([&] { LeaveFd(gone, left); }), HasSubstr("the peer's mailbox"));
}

TEST(UnitTest, SlotsOfAPeerHoldAProof) {
  for (const uint64_t good : {uint64_t{4'096}, uint64_t{8} << 20})
    EXPECT_NO_THROW(CheckSlotBytes(good));
  for (const uint64_t bad : {uint64_t{0}, uint64_t{1}, uint64_t{4'095}, uint64_t{1} << 60}) {
    EXPECT_THROW(CheckSlotBytes(bad), Error) << bad;
  }
}

TEST(UnitTest, FirstChoiceOfAWayCounts) {
  using Route = RouteChoices::Route;
  const auto routes = std::make_unique<RouteChoices>();
  constexpr uint64_t kNext = kSharedLaunches;  // in the same place
  for (const uint64_t number : {uint64_t{1}, 1 + kNext, 1 + 2 * kNext}) {
    const Route first = number == 1 ? Route::kSlots : Route::kZeroCopy;
    const Route second = number == 1 ? Route::kZeroCopy : Route::kSlots;
    EXPECT_FALSE(routes->Find(number));
    EXPECT_EQ(routes->Choose(number, first), first);
    EXPECT_TRUE(routes->Choose(number, second) == first && routes->Find(number) == first);
  }
  EXPECT_FALSE(routes->Find(2));
}

// Each callback waits for the next: only a thread of its own lets the last one come.
TEST(UnitTest, PoolNeverLetsCallbacksWaitForEachOther) {
  CompletionPool pool;
  constexpr size_t kCallbacks = 20;
  std::array<std::promise<void>, kCallbacks + 1> promises;
  for (size_t i = 0; i < kCallbacks; ++i) {
    pool.Run([&promises, i] {
      promises[i + 1].get_future().wait();
      promises[i].set_value();
    });
  }
  promises[kCallbacks].set_value();
  promises[0].get_future().wait();
  pool.Close(Clock::now() + std::chrono::seconds(10));
}

}  // namespace
}  // namespace jaxhet::testing
