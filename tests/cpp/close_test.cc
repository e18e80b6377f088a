#include <chrono>
#include <cstdlib>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cpp/testing.h"
#include "tests/cpp/world.h"
#include "xla_plugin/base/error.h"
#include "xla_plugin/engine/sibling_starts.h"

// Threads that are inside the engine while another one closes it.
namespace jaxhet::testing {
namespace {

using ::testing::HasSubstr;

// CLOSE_ROUNDS says another number.
int Rounds() {
  const char* const text = std::getenv("CLOSE_ROUNDS");
  return text == nullptr ? 300 : std::stoi(text);
}

// Calls `action` until the engine says that it is closed.
void CallUntilClosed(const std::function<void(int64_t)>& action) {
  try {
    for (int64_t i = 0;; ++i) action(i);
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("jaxhet is shut down"));
  }
}

// Stand-in for a thread of XLA: every start is answered once, with success or an error.
void StartUntilClosed(Engine& engine) {
  for (int64_t run = 1;; ++run) {
    ExchangeRequest request = GatherRequest(0, run);
    request.group = {0};
    Call call(std::move(request), {8}, {8});
    call.StartOn(engine);
    if (call.Wait()) return;
  }
}

void LookAtDevices(const Engine& engine) {
  for (int i = 0; i < 20; ++i) {
    EXPECT_TRUE(engine.DeviceStats().empty() && engine.DeviceFlightRecords().empty());
    EXPECT_THROW((void)engine.devices(), Error);
  }
}

TEST(CloseTest, CloseWhileOthersCall) {
  for (int round = 0; round < Rounds(); ++round) {
    const auto engine = std::make_shared<Engine>(0, 1, EngineOptions());
    engine->Connect(kLong);
    engine->SetRanks({{.device_id = 1, .process = 0, .island = 0, .vendor = "cpu"}});
    engine->AddPlan(kPlan, PlanText(8));
    std::vector<std::thread> threads;
    threads.emplace_back([=] { CallUntilClosed([&](int64_t i) { engine->AddPlan(i % 8, "x"); }); });
    threads.emplace_back([=] {
      CallUntilClosed([&](int64_t) {
        engine->Read([](const ProgressEngine& progress) { return progress.Stats(); });
      });
    });
    threads.emplace_back([=] { LookAtDevices(*engine); });
    threads.emplace_back([=] { StartUntilClosed(*engine); });
    std::this_thread::sleep_for(std::chrono::microseconds(10 * (round % 40)));
    engine->Close(std::chrono::milliseconds(round % 2 == 0 ? 0 : 1'000));
    for (std::thread& thread : threads) thread.join();
  }
}

TEST(CloseTest, CloseTwiceAtOnce) {
  for (int round = 0; round < Rounds() / 10; ++round) {
    World world(WorldOptions{});
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&, i] { world.engine(i % 2).Close(kLong); });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

// Two processes have two ranks each: rank 0 exchanges with 2, and 1 with 3.
ExchangeRequest PairRequest(int rank, int64_t run_id, int64_t index) {
  ExchangeRequest request = GatherRequest(rank, run_id);
  request.index = index;
  request.group = {rank % 2, rank % 2 + 2};
  request.siblings = {rank ^ 1};
  return request;
}

Call PairCall(int rank, int64_t run_id = 1, int64_t index = 0) {
  return Call(PairRequest(rank, run_id, index), {8}, {16});
}

TEST(CloseTest, CloseWaitsForARankThatIsBehind) {
  World world(WorldOptions{.ranks_per_process = 2});
  Call first = PairCall(0), second = PairCall(1), third = PairCall(2), fourth = PairCall(3);
  first.StartOn(world.engine(0));
  third.StartOn(world.engine(1));
  EXPECT_FALSE(first.Wait());  // the program has what it wanted, and ends
  std::thread end([&] { world.engine(0).Close(kLong); });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  fourth.StartOn(world.engine(1));
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  second.StartOn(world.engine(0));
  EXPECT_FALSE(second.Wait());
  EXPECT_FALSE(third.Wait());
  EXPECT_FALSE(fourth.Wait());
  world.engine(1).Close(kLong);
  end.join();
}

TEST(CloseTest, RankIsBehindUntilItHasStartedAsOftenAsItsSiblings) {
  SiblingStarts starts;
  for (int i = 0; i < 3; ++i) starts.Add(PairRequest(0, 1, 0));
  for (int i = 0; i < 3; ++i) {
    EXPECT_FALSE(starts.AreEven());
    starts.Add(PairRequest(1, 1, 0));
  }
  EXPECT_TRUE(starts.AreEven());
}

TEST(CloseTest, RankThatIsFarBehindIsStillExpected) {
  SiblingStarts starts;
  for (int64_t run = 1; run < 5; ++run) starts.Add(PairRequest(0, run, 0));
  for (int64_t run = 1; run < 5; ++run) {
    EXPECT_FALSE(starts.AreEven());
    starts.Add(PairRequest(1, run, 0));
  }
  EXPECT_TRUE(starts.AreEven());
}

TEST(CloseTest, RankThatNeverComesAgainIsForgotten) {
  SiblingStarts starts;
  for (int64_t run = 1; run <= 2'000; ++run) starts.Add(PairRequest(0, run, 0));
  for (int64_t run = 2'001 - 64; run <= 2'000; ++run) {
    EXPECT_FALSE(starts.AreEven());
    starts.Add(PairRequest(1, run, 0));
  }
  EXPECT_TRUE(starts.AreEven());
}

TEST(CloseTest, RankThatComesToAProgramWithoutSiblingsHasEndedThoseBefore) {
  SiblingStarts starts;
  starts.Add(PairRequest(0, 1, 0));
  ExchangeRequest alone = PairRequest(1, 2, 0);
  alone.siblings.clear();
  starts.Add(alone);
  EXPECT_TRUE(starts.AreEven());
}

TEST(CloseTest, RankInABranchOfItsOwnIsNotExpectedAfterItsNextProgram) {
  SiblingStarts starts;
  starts.Add(PairRequest(0, 1, 0));
  starts.Add(PairRequest(1, 2, 0));
  EXPECT_FALSE(starts.AreEven());
  starts.Add(PairRequest(0, 2, 0));
  EXPECT_TRUE(starts.AreEven());
}

}  // namespace
}  // namespace jaxhet::testing
