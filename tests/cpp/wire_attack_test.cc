#include <algorithm>
#include <memory>
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

// Two processes with a relay in each of their connections.
struct RelayedWorld {
  explicit RelayedWorld(const std::string& encryption) {
    WorldOptions options = FaultOptions("socket");
    options.engine.encryption = encryption;
    auto near = ConnectAll(2, 1);
    auto far = ConnectAll(2, 1);
    relays.push_back(
        std::make_unique<Relay>(std::move(near[1][0].control), std::move(far[0][1].control)));
    relays.push_back(
        std::make_unique<Relay>(std::move(near[1][0].data[0]), std::move(far[0][1].data[0])));
    near[1] = std::move(far[1]);
    world = std::make_unique<World>(options, std::move(near));
  }

  std::vector<std::unique_ptr<Relay>> relays;  // outlive the world
  std::unique_ptr<World> world;
};

// Runs of 64 bytes of the data that two ranks sent.
bool IsVisible(const RelayedWorld& world, size_t num_bytes) {
  const std::string seen = world.relays[0]->seen() + world.relays[1]->seen();
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
      const RelayedWorld world(encryption);
      for (const auto& error : GatherBoth(*world.world, num_bytes)) EXPECT_FALSE(error);
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
