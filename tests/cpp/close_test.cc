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

}  // namespace
}  // namespace jaxhet::testing
