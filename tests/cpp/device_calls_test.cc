#include "tests/cpp/device_calls.h"

// Driver calls of one exchange between devices on each route. Their order decides results and
// speed.
namespace jaxhet::testing {
namespace {

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
0 announce: wait event 0
0 announce: write 0.reached = 1
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
0 done: wait 0.received[0] >= 1; wait 0.received[1] >= 1; wait 0.sent[0] >= 1; wait 0.sent[1] >= 1; wait 0.go_on >= 1
0 done: record event 0
0 program: wait event 0
)");
  ranks.Done(1, 0);
  ExpectRight(ranks, 0);
}

TEST(DeviceCallsTest, ChunksWaitForTheirSlots) {
  SimulatedRanks ranks({});
  ranks.Start(0, 0, SwapOf(16'000));
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
0 announce: wait event 0
0 announce: write 0.reached = 2
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
0 announce: wait event 0
0 announce: write 0.reached = 2
)");
}

TEST(DeviceCallsTest, ZeroCopyIsReadByTheTarget) {
  SimulatedRanks ranks(ZeroCopyOptions());
  StartBoth(ranks, 0, SwapOf(kLongBytes));
  ExpectCalls(ranks, R"(
0 program: record event 0
0 announce: wait event 0
0 announce: write 0>1.ready = 1; write 0.reached = 1
0 receive1: wait event 0
0 receive1: wait 1>0.ready >= 1
0 receive1: copy 0.y0[0] <- 1.x0[0], 2500
0 receive1: wait 1>0.abort >= 2147483647; write 1>0.taken[1] = 1; write 0.received[1] = 1
)");
  ranks.Done(0, 0);
  ExpectCalls(ranks, R"(
0 done: wait 0>1.taken[1] >= 1; wait 0.received[1] >= 1; wait 0.go_on >= 1; write 0.sent[done] = 1
0 done: record event 0
0 program: wait event 0
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
0 announce: wait event 0
0 announce: write 0>1.ready = 1; write 0.reached = 1
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
0 done: wait 0.received[1] >= 1; wait 0.go_on >= 1
0 done: record event 0
0 program: wait event 0
0 done: wait 0.received[1] >= 2; wait 0.go_on >= 1
0 done: record event 0
0 program: wait event 0
0 done: wait 0>1.taken[1] >= 1; wait 0.received[1] >= 3; wait 0.go_on >= 1; write 0.sent[done] = 1
0 done: record event 0
0 program: wait event 0
)");
  for (int part = 0; part < 3; ++part) ranks.Done(1, 0);
  ExpectRight(ranks, 0);
}

TEST(DeviceCallsTest, LateSourceGoesThroughSlots) {
  SimulatedRanks ranks(ZeroCopyOptions());
  ranks.Start(0, 0, SwapOf(1'500));
  ExpectCalls(ranks, R"(
0 program: record event 0
0 announce: wait event 0
0 announce: write 0>1.ready = 1; write 0.reached = 1
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
0 done: wait 0>1.taken[1] >= 1; wait 0.received[0] >= 1; wait 0.received[1] >= 1; wait 0.go_on >= 1; write 0.sent[done] = 1
0 done: record event 0
0 program: wait event 0
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
0 announce: wait event 0
0 announce: write 0.reached = 1
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
0 announce: wait event 0
0 announce: write 0.reached = 1
0 receive0: wait event 0
0 receive0: wait 1>0.tail[0] >= 1
0 receive0: copy 0.y0[0] <- 1>0.slot[0], 7
0 receive0: write 1>0.head[0] = 1
0 receive0: wait 1>0.abort >= 2147483647; write 0.received[0] = 1
0 done: wait 0.received[0] >= 1; wait 0.sent[0] >= 1; wait 0.go_on >= 1
0 done: record event 0
0 program: wait event 0
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
0 program: record event 0
0 announce: wait event 0
0 announce: write 0>1.ready = 1; write 0.reached = 1
0 done: wait 0>1.taken[1] >= 1; wait 0.go_on >= 1; write 0.sent[done] = 1
0 done: record event 0
0 program: wait event 0
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
0 announce: wait event 0
0 announce: write 0.reached = 2
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
0 announce: wait event 0
0 announce: write 0.reached = 1
1 program: record event 0
1 announce: wait event 0
1 announce: write 1.reached = 1
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
2 program: record event 0
2 announce: wait event 0
2 announce: write 2.reached = 1
0 done: wait 0.sent[0] >= 1; wait 0.sent[1] >= 1; wait 0.go_on >= 1
0 done: record event 0
0 program: wait event 0
1 done: wait 1.received[0] >= 1; wait 1.received[1] >= 1; wait 1.go_on >= 1
1 done: record event 0
1 program: wait event 0
2 done: wait 2.go_on >= 1
2 done: record event 0
2 program: wait event 0
)");
  EXPECT_TRUE(ranks.Run());
  for (int rank = 0; rank < 3; ++rank) EXPECT_TRUE(ranks.IsRight(rank, 0));
}

}  // namespace
}  // namespace jaxhet::testing
