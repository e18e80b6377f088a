#include <atomic>
#include <string_view>
#include <thread>
#include <utility>

#include "tests/cpp/device_calls.h"
#include "tests/cpp/world.h"

// Driver calls of exchanges between devices that concern several streams or several exchanges.
namespace jaxhet::testing {
namespace {

using Program = SimulatedRanks::Program;

size_t Count(std::string_view text, std::string_view part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string_view::npos; at = text.find(part, at + 1)) {
    ++count;
  }
  return count;
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
TEST(DeviceCallsStreamsTest, OwnBlockIsCopied) {
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
0 announce: wait event 0
0 announce: write 0>1.ready = 2; write 0.reached = 4
0 receive0: wait event 0
0 receive0: wait 2>0.ready >= 2
0 receive0: copy 0.y1[3000] <- 2.x1[0], 1500
0 receive0: wait 2>0.abort >= 2147483647; write 2>0.taken[0] = 2; write 0.received[0] = 1
0 program: record event 0
0 announce: wait event 0
0 announce: write 0>2.ready = 2
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
0 done: wait 0>1.taken[0] >= 2; wait 0.received[0] >= 1; wait 0.go_on >= 1; write 0.sent[done] = 1
0 done: wait 0>2.taken[0] >= 2; wait 0.received[0] >= 2; wait 0.go_on >= 2; write 0.sent[done] = 2
0 done: wait 0.received[1] >= 1; wait 0.go_on >= 3
0 done: record event 0
0 program: wait event 0
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

TEST(DeviceCallsStreamsTest, AnotherStreamLeavesItsCopiesToOurs) {
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
0 announce: wait event 0
0 announce: write 0.reached = 2
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
0 announce: wait event 0
0 announce: write 0.reached = 3
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
0 announce: wait event 0
0 announce: write 0>1.ready = 4; write 0.reached = 4
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
0 done: wait 0.received[0] >= 3; wait 0.sent[program] >= 1; wait 0.go_on >= 1
0 done: record event 0
0 other: wait event 0
0 done: wait 0.received[1] >= 1; wait 0.sent[1] >= 1; wait 0.go_on >= 2
0 done: record event 0
0 other: wait event 0
0 done: wait 0.received[0] >= 1; wait 0.received[1] >= 2; wait 0.sent[0] >= 1; wait 0.sent[1] >= 2; wait 0.go_on >= 3
0 done: record event 0
0 other: wait event 0
0 done: wait 0>1.taken[0] >= 4; wait 0.received[0] >= 2; wait 0.go_on >= 4; write 0.sent[done] = 1
0 done: record event 0
0 other: wait event 0
)");
  for (const int64_t index : {0, 1, 2, 3}) ranks.Done(1, index);
  for (const int64_t index : {0, 1, 2, 3}) ExpectRight(ranks, index);
}

// The slot of an eager message is needed again before its done.
TEST(DeviceCallsStreamsTest, OverdueEagerIsReceivedByTheStreams) {
  SimulatedRanks ranks({});
  for (int64_t index = 0; std::cmp_less(index, kChannelSlots); ++index)
    StartBoth(ranks, index, SwapOf(7));
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
0 send0: copy 0>1.slot[0] <- 0.x16[0], 7
0 send0: write 0>1.tail[0] = 2; write 0.sent[0] = 1
0 announce: wait event 0
0 announce: write 0.reached = 17
)");
  for (int64_t index = 0; std::cmp_less_equal(index, kChannelSlots); ++index) {
    for (const int rank : {0, 1}) ranks.Done(rank, index);
  }
  for (int64_t index = 0; std::cmp_less_equal(index, kChannelSlots); ++index)
    ExpectRight(ranks, index);
}

// The later exchange turns out to need the eager message's slot when the eager one is done.
void CheckOverdueAtTheDone(Program program) {
  SimulatedRanks ranks(ZeroCopyOptions());
  SimulatedExchange longer = SwapOf(17'000);  // a chunk more than slots
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

TEST(DeviceCallsStreamsTest, OverdueEagerIsReceivedOnce) {
  CheckOverdueAtTheDone(Program::kFirst);
  CheckOverdueAtTheDone(Program::kOther);
}

// A later exchange whose source is not there does not stop it.
TEST(DeviceCallsStreamsTest, EagerDoneOnAnotherStreamIsWaitedFor) {
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
0 done: wait 0.received[0] >= 1; wait 0.sent[program] >= 1; wait 0.go_on >= 1
0 done: record event 1
0 other: wait event 1
)");
  EXPECT_FALSE(ranks.Run());
  for (const int64_t index : {0, 1}) ranks.Start(1, index, SwapOf(index == 0 ? 7 : 1'500));
  ranks.Done(0, 1);
  for (const int64_t index : {0, 1}) ranks.Done(1, index);
  for (const int64_t index : {0, 1}) ExpectRight(ranks, index);
}

// Abandons what is in flight on rank 0 while its streams run.
void AbandonWhileStreamsRun(SimulatedRanks& ranks) {
  std::atomic<bool> is_over = false;
  std::thread streams([&] {
    while (!is_over) ranks.Run();
  });
  EXPECT_TRUE(ranks.rank(0).rescue().Abandon(kLong));
  is_over = true;
  streams.join();
}

// The program does not go on without poison, however late it comes to the start.
TEST(DeviceCallsStreamsTest, AbandonGoesOnWhereItRanOutOfTime) {
  SimulatedRanks ranks(ZeroCopyOptions());
  ranks.Start(0, 0, SwapOf(1'500));
  ranks.Done(0, 0);
  ranks.rank(0).rescue().Stop();
  EXPECT_FALSE(ranks.rank(0).rescue().Abandon(std::chrono::milliseconds(10)));
  AbandonWhileStreamsRun(ranks);
  EXPECT_TRUE(ranks.Run());
  EXPECT_TRUE(ranks.IsFilledWith(0, 0, kSimulatedPoison));
}

// After a failure a result that has not arrived is poison, and no stream waits any more.
TEST(DeviceCallsStreamsTest, AbandonedResultsArePoisoned) {
  SimulatedRanks ranks(ZeroCopyOptions());
  ranks.Start(0, 0, SwapOf(7));
  ranks.Start(0, 1, SwapOf(1'500));
  for (const int64_t index : {1, 0}) ranks.Done(0, index);
  ranks.Calls();
  EXPECT_FALSE(ranks.Run());
  ranks.rank(0).rescue().Stop();
  AbandonWhileStreamsRun(ranks);
  ExpectCalls(ranks, R"(
0 rescue: fill 0.y1[0] with 255, 1500
0 rescue: fill 0.y0[0] with 255, 7
)");
  EXPECT_TRUE(ranks.Run());
  for (const int64_t index : {0, 1}) EXPECT_TRUE(ranks.IsFilledWith(0, index, kSimulatedPoison));
}

}  // namespace
}  // namespace jaxhet::testing
