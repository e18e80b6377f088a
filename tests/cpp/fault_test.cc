
#include <csignal>
#include <thread>

#include "tests/cpp/testing.h"
#include "tests/cpp/world.h"

// Peers that die, stop, are cut off or leave.
namespace jaxhet::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

using std::chrono::milliseconds;

// Tests of every transport.
class PeerFaultTest : public ::testing::TestWithParam<std::string> {};

void ExpectPeerError(const std::optional<Error>& error, std::string_view words,
                     const Location& location = Location::current()) {
  const CalledAt here(location);
  ASSERT_TRUE(error.has_value());
  EXPECT_THAT(error->what(), AllOf(HasSubstr("jaxhet.PeerError: ["), HasSubstr(words)));
}

TEST_P(PeerFaultTest, ReportsDeathWhileWaiting) {
  const WorldOptions options = FaultOptions(GetParam());
  ForkedPeer peer(options, WaitForEver);
  SetUpEngine(peer.engine(), options);
  std::thread killer([&] {
    std::this_thread::sleep_for(milliseconds(50));
    peer.Kill(SIGKILL);
  });
  const auto error = Gather(peer.engine(), 0, 100'000);
  ExpectPeerError(error,
                  "exchange 0 (op 0): rank 1 of process 1 (host 1), cpu1: the process has died");
  EXPECT_THAT(error->what(), HasSubstr("run the job again from its last checkpoint"));
  killer.join();
  ExpectPeerError(Gather(peer.engine(), 0, 8, 2), "the process has died");  // the first cause stays
}

// Stopped, given up by the others, and woken up: it must learn that it is out.
TEST_P(PeerFaultTest, ReportsStoppedPeer) {
  const WorldOptions options = FaultOptions(GetParam());
  ForkedPeer peer(options, [](Engine& engine) {
    for (int64_t run_id = 1;; ++run_id) {
      if (const auto error = Gather(engine, 1, 3 << 20, run_id)) {
        return error->code() == ErrorCode::kPeer && error->failed_process() == 1 ? 42 : 1;
      }
    }
  });
  SetUpEngine(peer.engine(), options);
  std::thread stopper([&] {
    std::this_thread::sleep_for(milliseconds(50));
    peer.Kill(SIGSTOP);
  });
  std::optional<Error> error;
  for (int64_t run_id = 1; !error; ++run_id) error = Gather(peer.engine(), 0, 3 << 20, run_id);
  ExpectPeerError(error, "it has been silent for");
  stopper.join();
  peer.Kill(SIGCONT);
  EXPECT_EQ(peer.ExitCode(), 42);
}

TEST_P(PeerFaultTest, RefusesPeerThatLeft) {
  const WorldOptions options = FaultOptions(GetParam());
  World world(options);
  std::thread closer([&] { world.engine(1).Close(kLong); });
  std::this_thread::sleep_for(milliseconds(50));
  EXPECT_EQ(world.engine(0).failure(), nullptr);
  ExpectPeerError(Gather(world.engine(0), 0, 8), "process 1 (host 1) has left the job");
  closer.join();
}

TEST(FaultTest, CloseFailsWhatIsUnderWay) {
  World world(FaultOptions("socket"));
  Call call(GatherRequest(0), {8}, {16});
  call.StartOn(world.engine(0));
  world.engine(0).Close(milliseconds(50));
  EXPECT_THAT(call.Wait()->what(), HasSubstr("still under way when this process left"));
  const auto theirs = world.engine(1).WaitFailure(kLong);
  EXPECT_TRUE(theirs != nullptr && theirs->failed_process() == 0);
  EXPECT_THAT(Gather(world.engine(0), 0, 8)->what(), HasSubstr("jaxhet is shut down"));
}

// Neither a running nor a failed engine spins.
TEST_P(PeerFaultTest, ThreadsSleepWhenIdle) {
  World world(FaultOptions(GetParam()));
  for (const auto& error : GatherBoth(world, 300'001)) EXPECT_FALSE(error);
  EXPECT_LT(IdleCpuMs(), 100);
  world.engine(0).Fail(Error(ErrorCode::kDevice, "found by Python"));
  EXPECT_NE(world.engine(1).WaitFailure(kLong), nullptr);
  EXPECT_LT(IdleCpuMs(), 100);
}

TEST(FaultTest, ForkedChildHasNoPart) {
  const auto engine = std::make_shared<Engine>(0, 1, EngineOptions());
  engine->Connect(kLong);
  const pid_t pid = StartChild([&] {
    const int32_t before = CountFds();
    engine->AbandonInChild();
    EXPECT_EQ(before - CountFds(), 2);  // epoll and the wake-up; ForkedChildTest has the sockets
    const auto error = Gather(*engine, 0, 8);
    EXPECT_TRUE(error.has_value());
    if (error) {
      EXPECT_THAT(error->what(), HasSubstr("was forked"));
    }
    return 42;
  });
  EXPECT_EQ(WaitForChild(pid), 42);
  EXPECT_EQ(engine->failure(), nullptr);
}

INSTANTIATE_TEST_SUITE_P(Transports, PeerFaultTest,
                         ::testing::Values("process_vm", "verbs", "socket"),
                         [](const auto& test) { return test.param; });

}  // namespace
}  // namespace jaxhet::testing
