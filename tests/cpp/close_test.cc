#include <sys/socket.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/cpp/relay.h"
#include "tests/cpp/testing.h"
#include "tests/cpp/world.h"
#include "xla_plugin/base/error.h"
#include "xla_plugin/engine/host/open_exchanges.h"

// Threads that are inside the engine while another one closes it, and what the close waits for.
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
    EXPECT_TRUE(engine.FindDevices() == nullptr);
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

TEST(CloseTest, CloseDoesNotWaitForASilentPeer) {
  World world(WorldOptions{});
  std::promise<void> closed;
  std::thread silent([&, is_closed = closed.get_future()]() mutable {
    // Nothing moves at the peer meanwhile.
    world.engine(1).Read([&](const ProgressEngine&) { return is_closed.wait_for(kLong); });
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const auto begin = Clock::now();
  world.engine(0).Close(std::chrono::milliseconds(200));
  const auto waited = Clock::now() - begin;
  EXPECT_GE(waited, std::chrono::milliseconds(200));
  EXPECT_LT(waited, kLong / 4);
  closed.set_value();
  silent.join();
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

// A connection whose kernel keeps a few KiB until somebody reads.
std::pair<Fd, Fd> NarrowPair() {
  std::array<int, 2> ends{};
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()), 0);
  const int num_bytes = 4'096;
  setsockopt(ends[0], SOL_SOCKET, SO_SNDBUF, &num_bytes, sizeof num_bytes);
  return {Fd(ends[0]), Fd(ends[1])};
}

// The network is full when the sender of an exchange leaves the job.
TEST(CloseTest, CloseWaitsForBytesThatTheNetworkHasNotTaken) {
  for (const std::string encryption : {"off", "auth", "full"}) {
    WorldOptions options;
    options.engine.encryption = encryption;
    auto ends = ConnectAll(2, 1);
    std::tie(ends[0][1].control, ends[1][0].control) = NarrowPair();  // all is one path
    auto [sending, from] = NarrowPair();
    auto [to, receiving] = NarrowPair();
    ends[0][1].data[0] = std::move(sending);
    ends[1][0].data[0] = std::move(receiving);
    World world(options, std::move(ends));
    std::deque<Call> calls;
    for (const int rank : {0, 1}) {
      ExchangeRequest request = GatherRequest(rank);
      request.kind = ExchangeKind::kPermute;
      request.pairs = {{0, 1}};
      calls.emplace_back(std::move(request), std::vector<size_t>{60'000},
                         std::vector<size_t>{60'000});
      calls.back().StartOn(world.engine(rank));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    std::thread end([&] { world.engine(0).Close(kLong); });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const Relay network(std::move(from), std::move(to));
    for (Call& call : calls) EXPECT_FALSE(call.Wait());
    EXPECT_TRUE(AreEqual(calls[1].results[0], calls[0].operands[0]));
    world.engine(1).Close(kLong);
    end.join();
  }
}

// In a loop of one program, and in several executions.
TEST(CloseTest, RankIsBehindUntilItHasStartedAsOftenAsItsSiblings) {
  for (const int64_t step : {0, 1}) {
    SiblingStarts starts;
    for (int64_t i = 0; i < 4; ++i) starts.Add(PairRequest(0, 1 + i * step, 0));
    for (int64_t i = 0; i < 4; ++i) {
      EXPECT_FALSE(starts.AreEven());
      starts.Add(PairRequest(1, 1 + i * step, 0));
    }
    EXPECT_TRUE(starts.AreEven());
  }
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
  alone.siblings = {};
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
