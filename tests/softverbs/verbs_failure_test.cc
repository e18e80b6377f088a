#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <deque>
#include <optional>
#include <thread>

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

class VerbsWorld {
 public:
  explicit VerbsWorld(const verbs::Options& options = NicOptions()) : world_(WithVerbs(options)) {}
  World& world() { return world_; }

  std::array<std::optional<Error>, 2> Gather(size_t num_bytes) {
    return GatherBoth(world_, num_bytes, run_id_++);
  }

  void ExpectGathers(size_t num_bytes, const Location& location = Location::current()) {
    const CalledAt here(location);
    for (const auto& error : Gather(num_bytes)) EXPECT_FALSE(error) << (error ? error->what() : "");
  }

 private:
  static WorldOptions WithVerbs(const verbs::Options& options) {
    WorldOptions world{.transports = {"verbs"}};
    world.engine.verbs = options;
    return world;
  }

  World world_;
  int64_t run_id_ = 1;
};

constexpr size_t kManyBytes = (size_t{5} << 20) + 3;

TEST(VerbsFailureTest, NamesTheStatus) {
  VerbsWorld world;
  const FaultScope scope({.kind = FaultKind::kError, .number = 12, .count = kAll});
  const auto errors = world.Gather(kManyBytes);
  for (const auto& error : errors) {
    ASSERT_TRUE(error && error->code() == ErrorCode::kPeer);
    EXPECT_THAT(error->what(), HasSubstr("rank "));
    EXPECT_THAT(error->what(), HasSubstr(": soft"));
    EXPECT_THAT(error->what(),
                HasSubstr("transport retry counter exceeded (status 12, vendor error "));
    EXPECT_THAT(error->what(), HasSubstr("JAXHET_VERBS_GID_INDEX"));
  }
}

Fault Refused(std::string_view call, int error_number) {
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
      [](const ProgressEngine& progress) { return progress.peers().Of(1).refusals; });
  EXPECT_EQ(refusals.back().transport, "verbs");
  EXPECT_THAT(refusals.back().reason, HasSubstr("ulimit -l"));
}

TEST(VerbsFailureTest, VerbsCyclesLeaveNothingBehind) {
  const int64_t objects = Softverbs().num_objects();
  const int32_t fds = CountFds();
  for (int i = 0; i < 100; ++i) {
    VerbsWorld world;
    if (i % 10 == 1) world.ExpectGathers(kManyBytes / 50);
    if (i % 25 != 2) continue;
    const FaultScope scope({.kind = FaultKind::kError, .number = 12});
    EXPECT_TRUE(world.Gather(kManyBytes / 50)[0]);
  }
  EXPECT_EQ(Softverbs().num_objects(), objects);
  EXPECT_EQ(CountFds(), fds);
}

double CpuSeconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

TEST(VerbsFailureTest, IdleUsesNoCpu) {
  VerbsWorld world;
  world.ExpectGathers(kManyBytes);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const double before = CpuSeconds();
  std::this_thread::sleep_for(std::chrono::milliseconds(1'000));
  EXPECT_LT(CpuSeconds() - before, 0.05);
}

}  // namespace
}  // namespace jaxhet::testing
