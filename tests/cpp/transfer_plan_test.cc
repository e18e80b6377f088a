#include "xla_plugin/engine/device/transfer_plan.h"

#include <cstddef>
#include <optional>
#include <vector>

#include "tests/cpp/testing.h"

// The plan of exchanges between devices. simulated_device_test.cc carries plans out.
namespace jaxhet::testing {
namespace {

using ::testing::HasSubstr;

std::vector<DeviceTransfer> GatherPlan(int rank, std::vector<int64_t> ranks, size_t num_bytes,
                                       size_t result_bytes) {
  std::vector<std::byte> operand(num_bytes);
  std::vector<std::byte> result(result_bytes);
  DeviceRequest request;
  request.kind = ExchangeKind::kAllGather;
  request.ranks = ranks;
  request.group_size = static_cast<int64_t>(ranks.size());
  request.operand = operand;
  request.result = result;
  return PlanTransfers(request, rank);
}

// Distances grow from one transfer to the next, so that no two ranks send to one at the same time.
TEST(TransferPlanTest, TransfersOfAGroupAreByDistance) {
  constexpr int kRanks = 5;
  for (int rank = 0; rank < kRanks; ++rank) {
    const std::vector<DeviceTransfer> plan =
        GatherPlan(rank, {0, 1, 2, 3, 4}, 10, size_t{10} * kRanks);
    EXPECT_EQ(plan.size(), size_t{kRanks});
    for (int i = 0; i + 1 < kRanks; ++i) {
      const DeviceTransfer& transfer = plan.at(static_cast<size_t>(i));
      EXPECT_EQ(transfer.target, (rank + i + 1) % kRanks);
      EXPECT_EQ(transfer.source, (rank + kRanks - i - 1) % kRanks);
      EXPECT_FALSE(transfer.is_own());
    }
    EXPECT_TRUE(plan.back().is_own() && plan.back().target < 0 && plan.back().source < 0);
  }
}

TEST(TransferPlanTest, RoutesFollowTheChannelsState) {
  const ChannelState shared{.slot_bytes = 100, .is_shared = true, .next_chunk = 3};
  const ChannelState proxied{.slot_bytes = 100, .is_shared = false, .next_chunk = 3};
  const SendState free{
      .is_zero_copy = false, .may_be_eager = true, .overtakes = false, .is_free = true};
  const auto is_eager = [&](const ChannelState& channel, size_t num_bytes, SendState state) {
    return Is<Eager>(SendRoute(channel, num_bytes, state));
  };
  EXPECT_TRUE(is_eager(shared, 100, free));
  EXPECT_TRUE(!is_eager(shared, 101, free) && !is_eager(proxied, 100, free));
  SendState state = free;
  state.may_be_eager = false;
  EXPECT_FALSE(is_eager(shared, 100, state));
  state = free;
  state.overtakes = true;
  EXPECT_FALSE(is_eager(shared, 100, state));
  state = free;
  state.is_free = false;
  EXPECT_FALSE(is_eager(shared, 100, state));
  state.is_zero_copy = true;
  EXPECT_TRUE(Is<ZeroCopy>(SendRoute(shared, 100, state)));
  EXPECT_EQ(FirstChunkOf(SendRoute(proxied, 100, free)), uint64_t{3});
  const auto route = [&](size_t num_bytes, RouteChoices::Route chosen, bool may_be_eager) {
    return std::optional(ReceiveRoute(shared, num_bytes, chosen, may_be_eager));
  };
  EXPECT_TRUE(Is<ZeroCopy>(route(7, RouteChoices::Route::kZeroCopy, true)));
  EXPECT_TRUE(Is<Eager>(route(100, RouteChoices::Route::kSlots, true)));
  EXPECT_TRUE(Is<Slots>(route(101, RouteChoices::Route::kSlots, true)));
  EXPECT_TRUE(Is<Slots>(route(7, RouteChoices::Route::kSlots, false)));
}

TEST(TransferPlanTest, WrongSizesAreRefused) {
  EXPECT_THAT(ThrownText([] { (void)GatherPlan(0, {0, 1}, 100, 199); }),
              HasSubstr("an exchange of 2 devices can't turn 100 bytes into 199"));
}

}  // namespace
}  // namespace jaxhet::testing
