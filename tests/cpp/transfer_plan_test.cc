#include <cstddef>
#include <vector>

#include "tests/cpp/testing.h"
#include "xla_plugin/engine/device/in_flight.h"

// The plan of exchanges between devices. simulated_device_test.cc carries plans out.
namespace jaxhet::testing {
namespace {

using ::testing::HasSubstr;

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
      EXPECT_FALSE(transfer.is_own);
    }
    EXPECT_TRUE(plan.back().is_own && plan.back().target < 0 && plan.back().source < 0);
  }
}

TEST(TransferPlanTest, WrongSizesAreRefused) {
  EXPECT_THAT(ThrownText([] { (void)GatherPlan(0, {0, 1}, 100, 199); }),
              HasSubstr("an exchange of 2 devices can't turn 100 bytes into 199"));
}

}  // namespace
}  // namespace jaxhet::testing
