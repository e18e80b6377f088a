#include <algorithm>
#include <array>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cpp/relay.h"
#include "tests/cpp/testing.h"
#include "tests/cpp/world.h"
#include "xla_plugin/base/error.h"

// Somebody between two processes reads what they send. seal_test.cc and chaos_test.cc change it.
namespace jaxhet::testing {
namespace {

using ::testing::HasSubstr;

constexpr size_t kControl = 0;
constexpr size_t kData = 1;  // with one data connection

// Two processes with a relay in each of their connections.
class RelayedWorld {
 public:
  explicit RelayedWorld(const std::string& encryption) {
    WorldOptions options = FaultOptions("socket");
    options.engine.encryption = encryption;
    auto near = ConnectAll(2, 1);
    auto far = ConnectAll(2, 1);
    relays_.push_back(
        std::make_unique<Relay>(std::move(near[1][0].control), std::move(far[0][1].control)));
    relays_.push_back(
        std::make_unique<Relay>(std::move(near[1][0].data[0]), std::move(far[0][1].data[0])));
    engines_[0] = MakeEngine(0, options, std::move(near[0]));
    engines_[1] = MakeEngine(1, options, std::move(far[1]));
    std::thread other([&] { SetUpEngine(*engines_[1], options); });
    SetUpEngine(*engines_[0], options);
    other.join();
  }
  ~RelayedWorld() {
    std::thread other([&] { engines_[1]->Close(std::chrono::milliseconds(200)); });
    engines_[0]->Close(std::chrono::milliseconds(200));
    other.join();
  }
  RelayedWorld(const RelayedWorld&) = delete;
  RelayedWorld& operator=(const RelayedWorld&) = delete;

  Relay& relay(size_t connection) { return *relays_.at(connection); }

  // Both ranks gather; whether each got what the other sent, and its error.
  struct Outcome {
    bool is_right;
    std::optional<Error> error;
  };
  std::array<Outcome, 2> Gather(size_t num_bytes, int64_t run_id) {
    std::deque<Call> calls;
    std::array<Outcome, 2> outcomes;
    for (const int rank : {0, 1}) {
      calls.emplace_back(GatherRequest(rank, run_id), std::vector{num_bytes},
                         std::vector{2 * num_bytes});
    }
    for (const size_t rank : {0U, 1U}) calls[rank].StartOn(*engines_.at(rank));
    for (const size_t rank : {0U, 1U}) {
      outcomes.at(rank).error = calls[rank].Wait();
      const auto theirs = std::span(calls[rank].results[0]).subspan((1 - rank) * num_bytes);
      outcomes.at(rank).is_right = AreEqual(theirs.first(num_bytes), calls[1 - rank].operands[0]);
    }
    return outcomes;
  }

 private:
  std::vector<std::unique_ptr<Relay>> relays_;
  std::array<std::unique_ptr<Engine>, 2> engines_;
};

// Runs of 64 bytes of the data that two ranks sent.
bool IsVisible(RelayedWorld& world, size_t num_bytes) {
  const std::string seen = world.relay(kControl).seen() + world.relay(kData).seen();
  for (const int rank : {0, 1}) {
    const auto sent = Pattern(rank, 0, num_bytes);
    const std::string text(reinterpret_cast<const char*>(sent.data()), sent.size());
    for (size_t i = 0; i + 64 <= text.size(); i += 64) {
      if (seen.find(text.substr(i, 64)) != std::string::npos) return true;
    }
  }
  return seen.find("line 3") != std::string::npos;  // a line of the plan
}

TEST(WireAttackTest, FullHidesDataAndPlans) {
  const std::vector<std::pair<std::string, bool>> cases = {
      {"off", true}, {"auth", true}, {"full", false}};
  for (const auto& [encryption, is_visible] : cases) {
    for (const size_t num_bytes : {1'000U, 300'000U}) {
      RelayedWorld world(encryption);
      for (const auto& [is_right, error] : world.Gather(num_bytes, 1))
        EXPECT_TRUE(is_right && !error);
      EXPECT_EQ(IsVisible(world, num_bytes), is_visible);
    }
  }
}

TEST(WireAttackTest, RdmaIsLeftForSocketsInWords) {
  WorldOptions options{.transports = {"verbs", "socket"}};
  options.engine.encryption = "full";
  World world(options);
  world.engine(0).Read([](const ProgressEngine& progress) {
    const Peer& peer = progress.peers().Of(1);
    EXPECT_EQ(peer.transport, "socket");
    const auto verbs = std::ranges::find(peer.refusals, "verbs", &Refusal::transport);
    EXPECT_NE(verbs, peer.refusals.end());
    EXPECT_THAT(verbs->reason, HasSubstr("NICs can't encrypt what they read out of memory"));
    EXPECT_THAT(verbs->reason, HasSubstr("JAXHET_ENCRYPTION is full"));
    return 0;
  });
}

TEST(WireAttackTest, RdmaAloneIsRefusedInWords) {
  WorldOptions options{.transports = {"verbs"}};
  options.engine.encryption = "auth";
  auto ends = ConnectAll(2);
  const auto first = MakeEngine(0, options, std::move(ends[0]));
  const auto second = MakeEngine(1, options, std::move(ends[1]));
  std::thread other([&] { EXPECT_THROW(second->Connect(kLong), Error); });
  const std::string error = ThrownText([&] { first->Connect(kLong); });
  other.join();
  EXPECT_THAT(error, HasSubstr("no transport reaches it"));
  EXPECT_THAT(error, HasSubstr("verbs: NICs can't encrypt what they read out of memory, and "
                               "JAXHET_ENCRYPTION is auth"));
}

}  // namespace
}  // namespace jaxhet::testing
