#include <cerrno>
#include <optional>
#include <thread>
#include <vector>

#include "tests/cpp/device_world.h"
#include "tests/cpp/host_device.h"
#include "tests/cpp/testing.h"
#include "tests/softverbs/softverbs.h"
#include "xla_plugin/transport/verbs/device_slots.h"
#include "xla_plugin/transport/verbs/nics.h"
#include "xla_plugin/transport/verbs/operand_region.h"

// Exchanges between devices over NICs: how their memory is registered, and what happens when queue
// pairs fail.
namespace jaxhet::testing {
namespace {

using ::testing::HasSubstr;

constexpr size_t kNumSlots = 4;

class SlotsOfADevice {
 public:
  SlotsOfADevice() : slots_(*device_, nics_.Usable(), nics_.options(), kNumSlots, kSlotBytes) {}

  const std::string& way() const { return slots_.way(); }

 private:
  std::unique_ptr<Device> device_ = OpenHostDevice();
  verbs::Nics nics_{NicOptions()};
  verbs::DeviceSlots slots_;
};

TEST(VerbsChannelTest, MemoryIsRegisteredAsDmaBuf) { EXPECT_EQ(SlotsOfADevice().way(), "dma-buf"); }

TEST(VerbsChannelTest, PeerMemoryIsNextBest) {
  const FaultScope fault(StrCat("call ibv_reg_dmabuf_mr errno=", EOPNOTSUPP, " count=all"));
  EXPECT_EQ(SlotsOfADevice().way(), "peer memory");
}

// Some kernels register a dma-buf and lose what is written to it.
TEST(VerbsChannelTest, MemoryThatLosesDataIsNotUsed) {
  for (const char* const damage : {"lose", "garble"}) {
    const FaultScope fault(StrCat(damage, " memory=dmabuf count=all"));
    EXPECT_EQ(SlotsOfADevice().way(), "peer memory");
  }
}

TEST(VerbsChannelTest, PinnedMemoryIsLast) {
  const FaultScope fault("lose count=all");
  const std::string way = SlotsOfADevice().way();
  EXPECT_THAT(way, HasSubstr("pinned memory (dma-buf: soft"));
  EXPECT_THAT(
      way,
      HasSubstr("; peer memory: soft0:1 read stale data after host:0 (this host's memory) wrote to "
                "its memory: the NIC's reads are not coherent here)"));
}

// The first two writes to memory prove that a dma-buf can be read; the third one is lost, or the
// fourth one, which would overwrite what the device has read.
TEST(VerbsChannelTest, SaysWhichWritesAreNotSeen) {
  for (const int num_before : {2, 3}) {
    const FaultScope fault(StrCat("lose after=", num_before, " count=all"));
    EXPECT_THAT(
        SlotsOfADevice().way(),
        HasSubstr("pinned memory (dma-buf: host:0 (this host's memory) does not see what soft0:1 "
                  "wrote to its memory: the NIC's writes are not coherent here; peer memory: soft"))
        << num_before;
  }
}

// NICs send operands in the device's operand memory from there, and no others.
TEST(VerbsChannelTest, OperandsAreRegistered) {
  const auto device = OpenHostDevice();
  verbs::Nics nics{NicOptions()};
  const auto make = [&] {
    return verbs::OperandRegion(*device, nics.Usable(), nics.options(), OperandsOf(0));
  };
  const auto operands = make();
  EXPECT_EQ(operands.why_not(), std::string());
  const auto address = reinterpret_cast<uint64_t>(OperandsOf(1).data());
  EXPECT_EQ(operands.AddressOf(OperandsOf(1)).value_or(0), address);
  const std::vector<std::byte> elsewhere(100);
  EXPECT_FALSE(operands.AddressOf(elsewhere));
  const AddressRange all = device->sharing().RangeOf(OperandsOf(0).data());
  EXPECT_FALSE(operands.AddressOf({static_cast<const std::byte*>(all.base), all.num_bytes + 1}));

  const FaultScope fault("garble count=all");
  const auto garbled = make();
  EXPECT_THAT(garbled.why_not(), HasSubstr("dma-buf: soft"));
  EXPECT_THAT(
      garbled.why_not(),
      HasSubstr(" read stale data after host:0 (this host's memory) wrote to its memory: the NIC's "
                "reads are not coherent here"));
  EXPECT_THAT(garbled.why_not(), HasSubstr("; peer memory: soft"));
  EXPECT_FALSE(garbled.AddressOf(OperandsOf(1)));
}

// An AMD GPU's kernel writes into a cache, which NICs don't read. A host that waits for the device
// would empty it, but no exchange waits in this way.
TEST(VerbsChannelTest, OperandsThatStayInTheCacheAreNotSentFromTheirPlace) {
  const auto device = OpenHostDevice();
  verbs::Nics nics{NicOptions()};
  for (const bool by_events : {true, false}) {
    const CachedFills cache(by_events);
    const verbs::OperandRegion operands(*device, nics.Usable(), nics.options(), OperandsOf(0));
    EXPECT_EQ(operands.why_not().empty(), by_events);
    if (by_events) continue;
    EXPECT_THAT(operands.why_not(), HasSubstr("soft0:1 read stale data after host:0 (this host's"));
  }
}

// The start of a job makes few rounds of the proof. `doctor --qualify` makes more of them, and
// finds a NIC that reads stale data only now and then.
TEST(VerbsChannelTest, ManyRoundsFindWhatAJobsStartDoesNot) {
  const auto device = OpenHostDevice();
  verbs::Nics nics{NicOptions()};
  const auto prove = [&] { return verbs::ProveSends(*device, nics.Usable(), nics.options(), 20); };
  EXPECT_EQ(prove(), "");
  for (const int num_before : {30, 70}) {
    const FaultScope fault(StrCat("garble after=", num_before));
    EXPECT_THAT(ThrownText(prove), HasSubstr("coherent here")) << num_before;
  }
  const FaultScope fault("lose count=all");
  EXPECT_THAT(prove(), HasSubstr("read stale data"));  // no job would use it
}

// Both ends of a channel, which the test plays the devices of.
struct ChannelPair {
  ChannelPair() {
    const DeviceTransport& verbs = DeviceTransportOf("verbs");
    const auto setup = [this](int rank) -> ChannelSetup {
      const auto own = static_cast<size_t>(rank);
      return {.device = *device,
              .same_process = false,
              .same_host = false,
              .same_vendor = true,
              .slot_bytes = kSlotBytes,
              .pull_bytes = 1,
              .operands = OperandsOf(rank),
              .lanes = {},
              .messages = ends[own][1 - own].data.data(),
              .nics = &nics};
    };
    auto [end, offer] = verbs.make(setup(1));
    target = std::move(end);
    source = verbs.open(setup(0), offer);
    target->Accept(source->Answer());
    for (DeviceChannel* const each : {&*source, &*target}) each->Settle(proxy);
  }

  std::unique_ptr<Device> device = OpenHostDevice();
  std::vector<std::vector<Ends>> ends = ConnectAll(2, 1);
  verbs::Nics nics{NicOptions()};
  std::unique_ptr<DeviceChannel> source;
  std::unique_ptr<DeviceChannel> target;
  Proxy proxy;
};

// Announces exchange `number` of one chunk, as the source's device does.
void Send(ChannelPair& channel, uint32_t number, bool is_in_place) {
  const auto operand = OperandsOf(0);
  const auto place = channel.source->PlaceOf(operand);
  EXPECT_TRUE(place.has_value());
  ChannelWords& words = channel.source->words();
  words.source.Publish(number, {kPlan, 0, operand.size()}, place.value_or(0));
  words.routes.Choose(number,
                      is_in_place ? RouteChoices::Route::kZeroCopy : RouteChoices::Route::kSlots);
  (is_in_place ? words.ready.host() : words.tail[number - 1].host())
      .store(is_in_place ? number : 1);
  channel.source->Launched();
}

// A source that has failed lets its device go on: its memory is something else's by then.
void CheckNothingIsSentAfterTheCut(bool is_in_place) {
  ChannelPair channel;
  const auto has_arrived = [&](size_t slot) {
    return channel.target->words().tail.at(slot).host().load() > 0;
  };
  Send(channel, 1, is_in_place);
  EXPECT_TRUE(IsWithin(kLong, [&] { return has_arrived(0); }));
  const FaultScope fault("delay us=50000 count=all");
  const uint64_t before = Softverbs::Get().num_requests();
  Send(channel, 2, is_in_place);
  EXPECT_TRUE(IsWithin(kLong, [&] { return Softverbs::Get().num_requests() > before; }));
  channel.source->Cut();
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  EXPECT_EQ(Softverbs::Get().num_requests(), before + 1);  // one of two requests; the other waits
  EXPECT_FALSE(has_arrived(1));
}

TEST(VerbsChannelTest, NothingIsSentAfterTheCut) {
  for (const bool is_in_place : {false, true}) CheckNothingIsSentAfterTheCut(is_in_place);
}

WorldOptions VerbsOptions(bool has_operands) {
  WorldOptions options{.transports = {"verbs"}, .has_operands = has_operands};
  options.engine.slot_bytes = kSlotBytes;
  return options;
}

// Swaps of several sizes; false if an exchange fails.
bool Swaps(DeviceWorld& world) {
  for (const size_t num_bytes : {size_t{1}, kSlotBytes, kSlotBytes * 40 + 3}) {
    Side zero(0, SwapPairs(), num_bytes);
    Side one(1, SwapPairs(), num_bytes);
    for (Side* const side : {&zero, &one}) {
      side->Start(world);
      side->Done(world);
    }
    for (const int rank : {0, 1}) {
      if (!world.IsIdleWithin(rank, kLong)) return false;
    }
    if (!zero.IsFrom(1) || !one.IsFrom(0)) return false;
  }
  return true;
}

TEST(VerbsChannelTest, ChannelsGoOnWhenQueuePairsFail) {
  for (const char* const fault :
       {"error status=12", "error status=12 after=3 count=2", "error status=12 bytes=all",
        "flush after=5", "peer_flush after=2", "ghost us=2000 after=4", "ghost us=50000 after=9",
        "delay us=20000 count=5"}) {
    for (const bool has_operands : {false, true}) {
      DeviceWorld world(VerbsOptions(has_operands));
      const uint64_t before = Softverbs::Get().num_faults_fired();
      const FaultScope scope(fault);
      EXPECT_TRUE(Swaps(world)) << fault;
      EXPECT_GT(Softverbs::Get().num_faults_fired(), before) << fault;
      const uint64_t in_place = world.engine(0).DeviceStats().at("bytes_zero_copy_sent");
      EXPECT_EQ(in_place > 0, has_operands) << fault;
    }
  }
}

TEST(VerbsChannelTest, ChannelsGoOnWhenAPortGoesDown) {
  DeviceWorld world(VerbsOptions(/*has_operands=*/true));
  EXPECT_TRUE(Swaps(world));
  Softverbs::Get().Command("port soft0 1 down");
  EXPECT_TRUE(Swaps(world));
  Softverbs::Get().Command("port soft0 1 up");
  EXPECT_TRUE(Swaps(world));
}

TEST(VerbsChannelTest, LastQueuePairIsAnError) {
  Side zero(0, SwapPairs(), kSlotBytes);
  Side one(1, SwapPairs(), kSlotBytes);
  DeviceWorld world(VerbsOptions(/*has_operands=*/true));
  const FaultScope fault("error status=12 count=all");
  zero.Start(world);
  one.Start(world);
  const auto error = world.engine(0).WaitFailure(kLong);
  ASSERT_NE(error, nullptr);
  EXPECT_THAT(error->what(), HasSubstr("jaxhet.PeerError: [rank "));
  EXPECT_THAT(error->what(), HasSubstr("a device channel (verbs) broke: no queue pair is left"));
  EXPECT_THAT(error->what(), HasSubstr("IBV_WC_RETRY_EXC_ERR"));
}

}  // namespace
}  // namespace jaxhet::testing
