#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cpp/device_world.h"
#include "tests/cpp/host_device.h"
#include "tests/cpp/testing.h"
#include "tests/cpp/world.h"
#include "xla_plugin/base/error.h"

// Peers that introduce themselves, when a job starts or while its engines run.
namespace jaxhet::testing {
namespace {

using ::testing::HasSubstr;

using std::chrono::milliseconds;

// Both messages of process 1; `answer` is "ok" or "refused".
void Introduce(ControlChannel& channel, const std::string& answer) {
  const HelloInfo info{1};
  const std::string table = PackStrings(std::array<std::string, 3>{"socket", answer, "smoke"});
  channel.Send(MessageType::kHello,
               std::array{ObjectIovec(info), ToIovec(table.data(), table.size())});
  channel.Send(MessageType::kHelloReply, table);
}

// Process 0, and the other end of its connection to process 1, which the test plays.
struct Introduction {
  explicit Introduction(int64_t peer_timeout_ms) {
    auto ends = ConnectAll(2, 1);
    channel = std::make_unique<ControlChannel>(std::move(ends[1][0].control));
    data = std::move(ends[1][0].data);
    WorldOptions options = FaultOptions("socket");
    options.engine.heartbeat_ms = 20;
    options.engine.peer_timeout_ms = peer_timeout_ms;
    engine = MakeEngine(0, options, std::move(ends[0]));
  }
  ~Introduction() { engine->Close(milliseconds(10)); }
  Introduction(const Introduction&) = delete;
  Introduction& operator=(const Introduction&) = delete;

  void Say(const std::string& answer) const { Introduce(*channel, answer); }
  std::string ErrorOfConnect() const {
    return ThrownText([&] { engine->Connect(kLong); });
  }
  void ExpectSilence() const {
    const auto error = engine->WaitFailure(kLong);
    ASSERT_NE(error, nullptr);
    EXPECT_THAT(error->what(), HasSubstr("jaxhet.PeerError: "));
    EXPECT_THAT(error->what(), HasSubstr("process 1 (host 1)"));
    EXPECT_THAT(error->what(), HasSubstr("it has been silent for"));
  }

  std::unique_ptr<ControlChannel> channel;
  std::vector<Fd> data;
  std::unique_ptr<Engine> engine;
};

TEST(IntroductionTest, PeerMayBeSilentWhileItConnectsToOthers) {
  const Introduction introduction(/*peer_timeout_ms=*/100);
  introduction.Say("ok");
  introduction.engine->Connect(milliseconds(1'000));
  EXPECT_EQ(introduction.engine->WaitFailure(milliseconds(400)), nullptr);
  introduction.channel->Send(MessageType::kHeartbeat);
  introduction.ExpectSilence();
}

TEST(IntroductionTest, PeerThatNeverSpeaksIsSilentAfterTheDeadline) {
  const Introduction introduction(/*peer_timeout_ms=*/100);
  introduction.Say("ok");
  introduction.engine->Connect(milliseconds(200));
  introduction.ExpectSilence();
}

TEST(IntroductionTest, RefusalOfAllTransportsIsAnError) {
  const Introduction introduction(kFaultTimeoutMs);
  introduction.Say("refused");
  EXPECT_THAT(introduction.ErrorOfConnect(), HasSubstr("socket: the peer: smoke"));
}

TEST(IntroductionTest, FailureOfAPeerIsWhyNoTransportReachesIt) {
  const Introduction introduction(kFaultTimeoutMs);
  introduction.Say("refused");
  const FailInfo info{ErrorCode::kPeer, 2};
  constexpr std::string_view kText = "process 2 is gone";
  introduction.channel->Send(MessageType::kFail,
                             std::array{ObjectIovec(info), ToIovec(kText.data(), kText.size())});
  const std::string error = introduction.ErrorOfConnect();
  EXPECT_THAT(error, HasSubstr("jaxhet.PeerError: "));
  EXPECT_THAT(error, HasSubstr(kText));
}

TEST(IntroductionTest, PeerThatHasLeftIsWhyNoTransportReachesIt) {
  Introduction introduction(kFaultTimeoutMs);
  introduction.Say("refused");
  introduction.channel.reset();
  EXPECT_THAT(introduction.ErrorOfConnect(), HasSubstr("it left during the introduction"));
}

// Fills a connection, so that its close waits for the peer to read: for 20 s at most.
void SlowDownClose(const Fd& socket) {
  const linger slow{.l_onoff = 1, .l_linger = 20};
  if (setsockopt(socket.get(), SOL_SOCKET, SO_LINGER, &slow, sizeof slow) != 0) {
    ThrowErrno("setsockopt(SO_LINGER)");
  }
  const std::string bytes(1 << 16, 'x');
  while (send(socket.get(), bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL) > 0) {
  }
}

// Whether a failure is the next message but introductions, within `timeout`.
bool HearsFailure(ControlChannel& channel, milliseconds timeout) {
  const auto limit = std::chrono::steady_clock::now() + timeout;
  while (std::chrono::steady_clock::now() < limit) {
    while (const auto message = channel.Next()) {
      if (message->type == MessageType::kFail) return true;
    }
    pollfd polled{.fd = channel.socket()->fd(), .events = POLLIN, .revents = 0};
    if (poll(&polled, 1, 100) > 0) channel.socket()->OnEvents(POLLIN);
  }
  return false;
}

// A peer that sees the end of a data connection first would name this process in its error.
TEST(IntroductionTest, FailureOfAThirdProcessIsToldBeforeConnectionsEnd) {
  auto ends = ConnectAll(3, 1);
  SlowDownClose(ends[0][1].data[0]);
  ControlChannel channel(std::move(ends[1][0].control));
  Introduce(channel, "ok");
  ends[2][0].control.Reset();  // process 2 has died
  WorldOptions options = FaultOptions("socket");
  options.num_processes = 3;
  const auto engine = MakeEngine(0, options, std::move(ends[0]));
  std::thread connecting([&] {
    const std::string error = ThrownText([&] { engine->Connect(kLong); });
    EXPECT_THAT(error, HasSubstr("process 2 (host 2)"));
  });
  EXPECT_TRUE(HearsFailure(channel, milliseconds(5'000)));
  ends[1][0].data.clear();
  connecting.join();
  engine->Close(milliseconds(10));
}

// Two engines that run and do not know each other, and the sockets between them.
class Strangers {
 public:
  explicit Strangers(const std::string& transport = "socket") : options_(FaultOptions(transport)) {
    options_.engine.heartbeat_ms = 20;
    auto ends = ConnectAll(2);
    for (int process = 0; process < 2; ++process) {
      const auto i = static_cast<size_t>(process);
      specs_.at(i) = SpecOf(1 - process, options_, std::move(ends[i][1 - i]));
      engines_.at(i) = std::make_unique<Engine>(process, 2, options_.engine);
      SetUpEngine(*engines_.at(i), options_);
    }
  }
  ~Strangers() {
    std::thread other([&] { engines_[1]->Close(kLong); });
    engines_[0]->Close(kLong);
    other.join();
  }
  Strangers(const Strangers&) = delete;
  Strangers& operator=(const Strangers&) = delete;

  Engine& engine(size_t process) { return *engines_.at(process); }
  PeerSpec TakeSpec(size_t process) { return std::move(specs_.at(process)); }
  void Join(size_t process, milliseconds timeout = kLong) {
    engine(process).JoinPeer(TakeSpec(process), timeout);
  }
  void JoinBoth() {
    std::thread other([&] { Join(1); });
    Join(0);
    other.join();
  }

 private:
  WorldOptions options_;
  std::array<PeerSpec, 2> specs_;
  std::array<std::unique_ptr<Engine>, 2> engines_;
};

void GatherBoth(Strangers& strangers, size_t num_bytes) {
  std::optional<Error> error;
  std::thread other([&] { error = Gather(strangers.engine(1), 1, num_bytes); });
  EXPECT_FALSE(Gather(strangers.engine(0), 0, num_bytes));
  other.join();
  EXPECT_FALSE(error);
}

TEST(JoinTest, PeersThatJoinExchange) {
  for (const std::string transport : {"socket", "process_vm", "verbs"}) {
    Strangers strangers(transport);
    strangers.JoinBoth();
    GatherBoth(strangers, 300'001);
  }
}

// Exchanges between devices send no plan with their starts.
TEST(JoinTest, PeerThatJoinsHasThePlansOfDevices) {
  Strangers strangers;
  const auto knows_plan = [&](size_t process) {
    return strangers.engine(process).FactsOf(static_cast<int>(1 - process), kPlan, 0).plan;
  };
  for (const int rank : {0, 1}) {
    strangers.engine(static_cast<size_t>(rank))
        .OpenDevices(HostVendor(), {{rank, 0, {}}}, {}, kLong, {{rank, 1 - rank}});
  }
  strangers.JoinBoth();
  EXPECT_TRUE(IsWithin(kLong, [&] { return knows_plan(0) && knows_plan(1); }));
}

TEST(JoinTest, ExchangeWithAStrangerIsAnError) {
  Strangers strangers;
  const auto error = Gather(strangers.engine(0), 0, 8);
  ASSERT_TRUE(error.has_value());
  EXPECT_THAT(error->text(), HasSubstr("rank 1 is not connected"));
}

// The first start may be there before this engine knows the peer.
TEST(JoinTest, PeerMayStartBeforeThisEngineAdmitsIt) {
  Strangers strangers;
  std::optional<Error> error;
  std::thread other([&] {
    strangers.Join(1);
    error = Gather(strangers.engine(1), 1, 100);
  });
  strangers.Join(0);
  std::this_thread::sleep_for(milliseconds(50));
  EXPECT_FALSE(Gather(strangers.engine(0), 0, 100));
  other.join();
  EXPECT_FALSE(error);
}

TEST(JoinTest, FailedEngineTellsAPeerThatJoins) {
  Strangers strangers;
  strangers.engine(0).Fail(Error(ErrorCode::kPeer, "smoke", 0));
  strangers.JoinBoth();
  const auto error = strangers.engine(1).WaitFailure(kLong);
  ASSERT_NE(error, nullptr);
  EXPECT_THAT(error->what(), HasSubstr("smoke"));
}

TEST(JoinTest, PeerThatJoinsAndDiesIsNamed) {
  const WorldOptions options = FaultOptions("socket");
  auto ends = ConnectAll(2, 1);
  Engine engine(0, 2, options.engine);
  SetUpEngine(engine, options);
  ControlChannel channel(std::move(ends[1][0].control));
  Introduce(channel, "ok");
  engine.JoinPeer(SpecOf(1, options, std::move(ends[0][1])), kLong);
  channel = ControlChannel();
  const auto error = engine.WaitFailure(kLong);
  ASSERT_NE(error, nullptr);
  EXPECT_THAT(error->what(),
              HasSubstr("process 1 (host 1): the process has died or can't be reached"));
  engine.Close(milliseconds(10));
}

TEST(JoinTest, PeerThatLeavesWhileItJoinsIsAnErrorAndNoFailure) {
  Strangers strangers;
  strangers.TakeSpec(1);  // which closes its sockets
  const std::string error = ThrownText([&] { strangers.Join(0); });
  EXPECT_THAT(error, HasSubstr("process 1 (host 1): it left during the introduction"));
  EXPECT_EQ(strangers.engine(0).failure(), nullptr);
}

TEST(JoinTest, SilentPeerJoinsNoLongerThanTheTimeout) {
  Strangers strangers;
  const std::string error = ThrownText([&] { strangers.Join(0, milliseconds(50)); });
  EXPECT_THAT(error, HasSubstr("it has not answered the introduction in time"));
}

TEST(JoinTest, PeerThatIsConnectedCanNotJoin) {
  World world({});
  auto ends = ConnectAll(2);
  const std::string error = ThrownText(
      [&] { world.engine(0).JoinPeer(SpecOf(1, WorldOptions{}, std::move(ends[0][1])), kLong); });
  EXPECT_THAT(error, HasSubstr("process 1 was added twice"));
}

TEST(JoinTest, NobodyJoinsAClosedEngine) {
  Strangers strangers;
  strangers.engine(0).Close(milliseconds(10));
  EXPECT_THAT(ThrownText([&] { strangers.Join(0); }),
              HasSubstr("jaxhet is shut down in this process"));
}

TEST(JoinTest, EngineMayCloseWhileAPeerJoins) {
  Strangers strangers;
  std::thread joining([&] { EXPECT_THROW(strangers.Join(0, milliseconds(500)), Error); });
  std::this_thread::sleep_for(milliseconds(50));
  strangers.engine(0).Close(milliseconds(10));
  joining.join();
}

}  // namespace
}  // namespace jaxhet::testing
