#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <chrono>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cpp/testing.h"
#include "tests/cpp/world.h"

// Peers that fail or are silent while processes introduce themselves to each other.
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

}  // namespace
}  // namespace jaxhet::testing
