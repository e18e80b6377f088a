#include <algorithm>
#include <atomic>
#include <set>
#include <thread>

#include "tests/cpp/device_world.h"
#include "tests/cpp/host_device.h"
#include "tests/cpp/testing.h"

// Device channels that are opened when a program needs them.
namespace jaxhet::testing {
namespace {

using std::chrono::milliseconds;

// Ranks 0 and 1 are an island, 2 and 3 another one: only the rails are joined at the start.
WorldOptions RailOptions(std::string_view transport) {
  WorldOptions options = DeviceOptions(4, transport);
  for (const auto& [a, b] : {std::pair(0, 1), {2, 3}, {0, 3}, {1, 2}}) {
    options.later.push_back({a, b});
    options.later.push_back({b, a});
  }
  return options;
}

std::set<int> PeersOf(DeviceWorld& world, int rank) {
  std::set<int> peers;
  for (const auto& own : world.engine(rank).devices()->ranks()) {
    for (const auto& [peer_rank, channel] : own->channels().outgoing()) peers.insert(peer_rank);
  }
  return peers;
}

void Exchange(DeviceWorld& world, const Group& group, size_t num_bytes, int64_t index) {
  std::deque<Side> sides;
  for (const int64_t member : group.members) {
    sides.emplace_back(static_cast<int>(member), group, num_bytes, index);
  }
  RunSides(world, sides);
  for (const Side& side : sides) EXPECT_TRUE(side.HasAllBlocks()) << side.rank();
}

Group AllToAll(std::vector<int64_t> members) {
  return {ExchangeKind::kAllToAll, std::move(members)};
}

class LaterChannelsTest : public DeviceTransportsTest {};

TEST_P(LaterChannelsTest, ProgramOverRailsUsesThoseOfTheStart) {
  DeviceWorld world(RailOptions(GetParam()));
  Exchange(world, AllToAll({0, 2}), 3 * kSlotBytes + 5, 0);
  Exchange(world, AllToAll({1, 3}), 7, 0);
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(PeersOf(world, rank), std::set<int>{(rank + 2) % 4});
  }
}

TEST_P(LaterChannelsTest, ProgramThatNeedsOthersHasThem) {
  DeviceWorld world(RailOptions(GetParam()));
  // Processes that compile one program open all channels at the same time.
  std::vector<std::thread> threads;
  for (const ChannelPair& pair : RailOptions(GetParam()).later) {
    threads.emplace_back([&world, pair] { world.OpenLater(pair.rank, pair.peer_rank); });
  }
  for (int64_t index = 0; index < 4; ++index) Exchange(world, AllToAll({0, 2}), 900, index);
  for (std::thread& thread : threads) thread.join();
  for (const size_t num_bytes : {size_t{0}, size_t{1}, kSlotBytes, 20 * kSlotBytes + 1}) {
    Exchange(world, AllToAll({0, 1, 2, 3}), num_bytes, 4);
  }
  EXPECT_EQ(PeersOf(world, 0), (std::set<int>{1, 2, 3}));
}

// A device waits for a peer meanwhile: a call of its driver could wait as well.
TEST_P(LaterChannelsTest, OpeningOneMakesNoDriverCall) {
  DeviceWorld world(RailOptions(GetParam()));
  Side waiting(0, {0, 2, 2, 0}, kSlotBytes, 0);
  waiting.Start(world);
  waiting.Done(world);
  std::atomic<uint64_t> num_calls = 0;
  const auto open = [&](int rank, int peer_rank) {
    const uint64_t before = HostDeviceCalls();
    world.OpenLater(rank, peer_rank);
    num_calls += HostDeviceCalls() - before;
  };
  std::thread peer([&] { open(1, 0); });
  open(0, 1);
  peer.join();
  EXPECT_EQ(num_calls, 0);
  EXPECT_FALSE(world.device(0).IsIdle(world.stream(0)));
  Side other(2, {0, 2, 2, 0}, kSlotBytes, 0);
  other.Start(world);
  other.Done(world);
  EXPECT_TRUE(world.IsIdleWithin(0, kLong) && world.IsIdleWithin(2, kLong));
  EXPECT_TRUE(waiting.IsFrom(2) && other.IsFrom(0));
  Exchange(world, AllToAll({0, 1}), 2 * kSlotBytes, 1);
}

INSTANTIATE_TEST_SUITE_P(Transports, LaterChannelsTest,
                         ::testing::Values("socket", "sealed", "verbs"), NameOfParam);

TEST(LaterChannelFaultsTest, PeerThatHasLeftIsNamed) {
  DeviceWorld world(RailOptions("socket"));
  std::thread leaving([&] { world.engine(1).Close(milliseconds(3'000)); });
  EXPECT_TRUE(IsWithin(kLong, [&] { return world.engine(0).HasLeft(1); }));
  EXPECT_THAT(ThrownText([&] { world.OpenLater(0, 1); }),
              ::testing::ContainsRegex("PeerError: rank 1 .*has left the job: its program ended"));
  leaving.join();
}

TEST(LaterChannelFaultsTest, PeerThatFailsIsNamed) {
  DeviceWorld world(RailOptions("socket"));
  std::thread failing([&] {
    std::this_thread::sleep_for(milliseconds(100));
    world.engine(1).Fail(Error(ErrorCode::kDevice, "the GPU is lost"));
  });
  EXPECT_THAT(ThrownText([&] { world.OpenLater(0, 1); }), ::testing::HasSubstr("the GPU is lost"));
  failing.join();
}

TEST(LaterChannelFaultsTest, PeerThatDoesNotOpenItsEndIsNamedInTime) {
  DeviceWorld world(RailOptions("socket"));
  EXPECT_THAT(ThrownText([&] { world.OpenLater(0, 1, milliseconds(200)); }),
              ::testing::ContainsRegex(
                  "DeadlineError: rank 1 .*has not opened a device channel to rank 0"));
}

TEST(LaterChannelFaultsTest, OpeningOneEndsWhenTheEngineCloses) {
  DeviceWorld world(RailOptions("socket"));
  std::thread closing([&] {
    std::this_thread::sleep_for(milliseconds(100));
    world.engine(0).Close(milliseconds(0));
  });
  EXPECT_THAT(ThrownText([&] { world.OpenLater(0, 1); }), ::testing::HasSubstr("shut down"));
  closing.join();
}

}  // namespace
}  // namespace jaxhet::testing
