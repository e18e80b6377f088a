#include <chrono>
#include <cstdint>
#include <string>

#include "tests/cpp/testing.h"
#include "tests/cpp/world.h"
#include "tests/softverbs/softverbs.h"
#include "xla_plugin/net/verbs/nics.h"

// Failing queue pairs of the verbs transport: it says why it can't go on.
namespace jaxhet::testing {
namespace {

using softverbs::Fault;
using softverbs::FaultKind;
using softverbs::kAll;
using ::testing::HasSubstr;

Fault Refused(const char* call, int error_number) {
  return {.kind = FaultKind::kCall, .number = error_number, .count = kAll, .call = call};
}

std::string RefusalOf(const Fault& fault) {
  const FaultScope scope(fault);
  return ThrownText([] { verbs::Nics(NicOptions()).Usable(); });
}

TEST(VerbsFailureTest, SaysWhatToDoWhenSetUpFails) {
  EXPECT_THAT(
      RefusalOf(Refused("ibv_get_device_list", 38)),
      HasSubstr("ibv_get_device_list: Function not implemented (38). There is no RDMA NIC"));
  EXPECT_THAT(RefusalOf(Refused("ibv_open_device", 13)),
              HasSubstr("soft0: ibv_open_device on soft0: Permission denied (13)"));
  const FaultScope scope(Refused("ibv_reg_mr", 12));
  World world({.transports = {"verbs", "socket"}});
  const auto refusals = world.engine(0).Read(
      [](const ProgressEngine& progress) { return progress.peers().Of(1).counts.refusals; });
  EXPECT_EQ(refusals.back().transport, "verbs");
  EXPECT_THAT(refusals.back().reason, HasSubstr("ulimit -l"));
}

TEST(VerbsFailureTest, VerbsCyclesLeaveNothingBehind) {
  constexpr size_t kNumBytes = 100'003;
  const int64_t objects = Softverbs().num_objects();
  const int32_t fds = CountFds();
  for (int i = 0; i < 100; ++i) {
    World world({.transports = {"verbs"}});
    if (i % 10 == 1) {
      for (const auto& error : GatherBoth(world, kNumBytes)) EXPECT_FALSE(error);
    }
    if (i % 25 != 2) continue;
    const FaultScope scope({.kind = FaultKind::kError, .number = 12});
    EXPECT_TRUE(GatherBoth(world, kNumBytes)[0]);
  }
  EXPECT_EQ(Softverbs().num_objects(), objects);
  EXPECT_EQ(CountFds(), fds);
}

// A send queue holds requests until their completions arrive. Credits take places in it, too.
TEST(VerbsFailureTest, SlowCompletionsOverrunNoQueue) {
  WorldOptions options{.transports = {"verbs"}};
  options.engine.chunk_bytes = 4 << 10;
  options.engine.eager_bytes = 0;
  options.engine.verbs.depth = 4;
  World world(options);
  for (int64_t run_id = 1; run_id <= 3; ++run_id) {
    for (const auto& error : GatherBoth(world, 300'001, run_id)) EXPECT_FALSE(error);
  }
  Softverbs().SetJitter(std::chrono::milliseconds(2), 1);
  for (const auto& error : GatherBoth(world, 300'001, 4)) {
    EXPECT_FALSE(error) << error->what();
  }
  Softverbs().Clear();
}

}  // namespace
}  // namespace jaxhet::testing
