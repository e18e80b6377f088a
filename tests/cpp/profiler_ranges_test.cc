#include "xla_plugin/base/profiler_ranges.h"

#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "tests/cpp/device_world.h"
#include "tests/cpp/testing.h"
#include "tests/cpp/world.h"

// Ranges of exchanges. This program has NVTX's entry points, so that the engine takes them for a
// profiler's; they record their calls.
namespace jaxhet::testing {
namespace {

using ::testing::HasSubstr;

struct Record {
  std::mutex mutex;
  std::map<uint64_t, std::string> open;  // by id
  std::vector<std::string> started;
  std::vector<std::string> pushed;
  size_t popped = 0;
  uint64_t last_id = 0;
};

Record& TheRecord() {
  static Record record;
  return record;
}

thread_local int depth = 0;

}  // namespace
}  // namespace jaxhet::testing

// NOLINTBEGIN(readability-identifier-naming,misc-use-internal-linkage): the names are NVIDIA's.
#define ENTRY extern "C" __attribute__((visibility("default")))

ENTRY uint64_t nvtxRangeStartA(const char* name) {
  auto& record = jaxhet::testing::TheRecord();
  const std::lock_guard lock(record.mutex);
  record.started.emplace_back(name);
  record.open[++record.last_id] = name;
  return record.last_id;
}

ENTRY void nvtxRangeEnd(uint64_t id) {
  auto& record = jaxhet::testing::TheRecord();
  const std::lock_guard lock(record.mutex);
  EXPECT_EQ(record.open.erase(id), 1U) << "a range was not open";
}

ENTRY int nvtxRangePushA(const char* name) {
  auto& record = jaxhet::testing::TheRecord();
  const std::lock_guard lock(record.mutex);
  record.pushed.emplace_back(name);
  return jaxhet::testing::depth++;
}

ENTRY int nvtxRangePop() {
  auto& record = jaxhet::testing::TheRecord();
  const std::lock_guard lock(record.mutex);
  ++record.popped;
  return --jaxhet::testing::depth;
}
// NOLINTEND(readability-identifier-naming,misc-use-internal-linkage)

namespace jaxhet::testing {
namespace {

void Clear() {
  Record& record = TheRecord();
  const std::lock_guard lock(record.mutex);
  record.open.clear();
  record.started.clear();
  record.pushed.clear();
  record.popped = 0;
}

size_t NumOpen() {
  Record& record = TheRecord();
  const std::lock_guard lock(record.mutex);
  return record.open.size();
}

WorldOptions WithRanges(WorldOptions options) {
  options.engine.profiler_ranges = 1;
  return options;
}

TEST(ProfilerRangesTest, EachExchangeIsARangeThatEndsWithIt) {
  Clear();
  World world(WithRanges({}));
  Call zero(GatherRequest(0), {100'000}, {200'000});
  Call one(GatherRequest(1), {100'000}, {200'000});
  zero.StartOn(world.engine(0));
  EXPECT_TRUE(IsWithin(kLong, [] { return NumOpen() == 1; }));
  one.StartOn(world.engine(1));
  EXPECT_TRUE(!zero.Wait() && !one.Wait());
  EXPECT_EQ(NumOpen(), size_t{0});
  EXPECT_EQ(TheRecord().started, (std::vector<std::string>{"jaxhet rank 0: exchange 0 (op 0)",
                                                           "jaxhet rank 1: exchange 0 (op 0)"}));
}

TEST(ProfilerRangesTest, AFailureEndsTheRangesOfWhatIsUnderWay) {
  Clear();
  World world(WithRanges({}));
  Call zero(GatherRequest(0), {8}, {16});
  zero.StartOn(world.engine(0));
  EXPECT_TRUE(IsWithin(kLong, [] { return NumOpen() == 1; }));
  world.engine(0).Fail(Error(ErrorCode::kPeer, "a failure"));
  EXPECT_TRUE(zero.Wait().has_value());
  EXPECT_EQ(NumOpen(), size_t{0});
}

TEST(ProfilerRangesTest, DevicesHaveRangesAroundTheirLaunches) {
  Clear();
  DeviceWorld world(WithRanges(DeviceOptions(2)));
  Side zero(0, SwapPairs(), 100, 3);
  Side one(1, SwapPairs(), 100, 3);
  for (Side* const side : {&zero, &one}) side->Start(world);
  for (const Side* const side : {&zero, &one}) side->Done(world);
  EXPECT_TRUE(world.IsIdleWithin(0, kLong) && world.IsIdleWithin(1, kLong));
  EXPECT_TRUE(zero.IsFrom(1) && one.IsFrom(0));
  const std::multiset<std::string> names(TheRecord().pushed.begin(), TheRecord().pushed.end());
  EXPECT_EQ(names,
            (std::multiset<std::string>{
                "jaxhet rank 0 start: exchange 3 (op 3)", "jaxhet rank 1 start: exchange 3 (op 3)",
                "jaxhet rank 0 done: exchange 3 (op 3)", "jaxhet rank 1 done: exchange 3 (op 3)"}));
  EXPECT_EQ(TheRecord().popped, size_t{4});
  EXPECT_EQ(depth, 0);
}

TEST(ProfilerRangesTest, ThereAreNoRangesUnlessTheyAreWanted) {
  Clear();
  World world(WorldOptions{});
  Call zero(GatherRequest(0), {8}, {16});
  Call one(GatherRequest(1), {8}, {16});
  zero.StartOn(world.engine(0));
  one.StartOn(world.engine(1));
  EXPECT_TRUE(!zero.Wait() && !one.Wait());
  EXPECT_TRUE(TheRecord().started.empty() && TheRecord().pushed.empty());
}

TEST(ProfilerRangesTest, LibraryThatIsMissingIsNamed) {
  const std::array libraries = {RangeLibrary{"libno_such_ranges.so", "noStart", "noEnd", "", ""}};
  const std::string text = ThrownText([&] { LoadProfilerRanges(libraries); });
  EXPECT_THAT(
      text, HasSubstr("jaxhet.UsageError: JAXHET_PROFILER_RANGES=1 needs NVIDIA's NVTX or AMD's"));
  EXPECT_THAT(text, HasSubstr("libno_such_ranges.so: cannot open shared object file"));
  EXPECT_THAT(text,
              HasSubstr("Install one of them where the loader finds it, or unset the option"));
}

}  // namespace
}  // namespace jaxhet::testing
