#include <cerrno>
#include <optional>
#include <thread>
#include <vector>

#include "tests/cpp/device_world.h"
#include "tests/cpp/host_device.h"
#include "tests/cpp/testing.h"
#include "tests/softverbs/softverbs.h"
#include "xla_plugin/net/verbs/memory.h"
#include "xla_plugin/net/verbs/nics.h"

// Exchanges between devices over NICs: how their memory is registered, and what happens when queue
// pairs fail.
namespace jaxhet::testing {
namespace {

using softverbs::FaultKind;
using softverbs::kAll;
using ::testing::HasSubstr;

constexpr size_t kNumSlots = 4;

// Why the slots of a device are not in its memory.
std::string WhyPinned() {
  const auto device = OpenHostDevice();
  verbs::Nics nics{NicOptions()};
  return verbs::DeviceSlots(*device, nics.Usable(), nics.options(), kNumSlots, kSlotBytes)
      .why_pinned();
}

TEST(VerbsChannelTest, MemoryIsRegisteredAsDmaBuf) { EXPECT_EQ(WhyPinned(), ""); }

TEST(VerbsChannelTest, PinnedMemoryIsNextBest) {
  const FaultScope fault(
      {.kind = FaultKind::kCall, .number = EOPNOTSUPP, .count = kAll, .call = "ibv_reg_dmabuf_mr"});
  EXPECT_THAT(WhyPinned(), HasSubstr("ibv_reg_dmabuf_mr of "));
}

constexpr const char* kStale = "host:0 (this host's memory) does not see what soft0:1 copied";

// Some kernels register a dma-buf and lose writes to it.
TEST(VerbsChannelTest, MemoryThatLosesDataIsNotUsed) {
  for (const FaultKind damage : {FaultKind::kLose, FaultKind::kGarble}) {
    const FaultScope fault({.kind = damage, .count = kAll, .only_dmabuf = true});
    EXPECT_THAT(WhyPinned(), HasSubstr(kStale));
  }
}

// The first copy is right, and the second one, which would overwrite what the device has read, is
// lost.
TEST(VerbsChannelTest, MemoryThatKeepsOlderBytesIsNotUsed) {
  const FaultScope fault({.kind = FaultKind::kLose, .after = 1, .count = kAll});
  EXPECT_THAT(WhyPinned(), HasSubstr(kStale));
}

// An AMD GPU's kernel writes into a cache, which NICs don't read. A host that waits for the device
// would empty it, but no exchange waits in this way.
TEST(VerbsChannelTest, MemoryThatStaysInTheCacheIsNotUsed) {
  const CachedFills cache;
  EXPECT_THAT(WhyPinned(), HasSubstr(kStale));
}

// Both ends of a channel, which the test plays the devices of.
struct ChannelPair {
  ChannelPair() {
    const DeviceTransport& verbs = DeviceTransportOf("verbs");
    const auto setup = [this]() -> ChannelSetup {
      return {.device = *device,
              .same_process = false,
              .same_host = false,
              .same_vendor = true,
              .slot_bytes = kSlotBytes,
              .pull_bytes = 0,
              .operands = {},
              .lanes = {},
              .nics = &nics};
    };
    auto [end, offer] = verbs.make(setup());
    target = std::move(end);
    source = verbs.open(setup(), offer);
    target->Accept(source->Answer());
    for (DeviceChannel* const each : {&*source, &*target}) each->Settle(proxy);
  }

  std::unique_ptr<Device> device = OpenHostDevice();
  verbs::Nics nics{NicOptions()};
  std::unique_ptr<DeviceChannel> source;
  std::unique_ptr<DeviceChannel> target;
  Proxy proxy;
};

// Announces exchange `number` of one chunk, as the source's device does.
void Send(ChannelPair& channel, uint32_t number) {
  ChannelWords& words = channel.source->words();
  channel.source->source_log().Publish(number, {kPlan, 0, kSlotBytes});
  words.tail[number - 1].host().store(1);
  channel.source->Launched();
}

// A source that has failed lets its device go on, which may overwrite slots.
TEST(VerbsChannelTest, NothingIsSentAfterTheCut) {
  ChannelPair channel;
  const auto has_arrived = [&](size_t slot) {
    return channel.target->words().tail.at(slot).host().load() > 0;
  };
  Send(channel, 1);
  EXPECT_TRUE(IsWithin(kLong, [&] { return has_arrived(0); }));
  const FaultScope fault(
      {.kind = FaultKind::kDelay, .count = kAll, .delay = std::chrono::milliseconds(50)});
  const uint64_t before = Softverbs().num_requests();
  Send(channel, 2);
  EXPECT_TRUE(IsWithin(kLong, [&] { return Softverbs().num_requests() > before; }));
  channel.source->Cut();
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  EXPECT_EQ(Softverbs().num_requests(), before + 1);  // one of two requests; the other waits
  EXPECT_FALSE(has_arrived(1));
}

WorldOptions VerbsOptions() {
  WorldOptions options{.transports = {"verbs"}};
  options.engine.slot_bytes = kSlotBytes;
  return options;
}

TEST(VerbsChannelTest, QueuePairThatFailsIsAnError) {
  Side zero(0, SwapPairs(), kSlotBytes);
  Side one(1, SwapPairs(), kSlotBytes);
  DeviceWorld world(VerbsOptions());
  const FaultScope fault({.kind = FaultKind::kError, .number = 12, .count = kAll});
  zero.Start(world);
  one.Start(world);
  const auto error = world.engine(0).WaitFailure(kLong);
  ASSERT_NE(error, nullptr);
  EXPECT_THAT(error->what(), HasSubstr("jaxhet.PeerError: [rank "));
  EXPECT_THAT(error->what(), HasSubstr("a device channel (verbs) broke: soft"));
  EXPECT_THAT(error->what(),
              HasSubstr("transport retry counter exceeded (status 12, vendor error "));
}

}  // namespace
}  // namespace jaxhet::testing
