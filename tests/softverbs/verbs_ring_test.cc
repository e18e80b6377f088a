#include <cerrno>
#include <optional>
#include <thread>
#include <vector>

#include "tests/cpp/device_world.h"
#include "tests/cpp/testing.h"
#include "tests/softverbs/softverbs.h"
#include "xla_plugin/device/host/host.h"
#include "xla_plugin/transport/verbs/device_slots.h"
#include "xla_plugin/transport/verbs/nics.h"

// Exchanges between devices over NICs: how their memory is registered, and what happens when paths
// fail.
namespace jaxhet::testing {
namespace {

constexpr size_t kNumSlots = 4;

class SlotsOfADevice {
 public:
  SlotsOfADevice() : slots_(*device_, nics_.Usable(), nics_.options(), kNumSlots, kSlotBytes) {}

  const std::string& way() const { return slots_.way(); }

 private:
  std::unique_ptr<Device> device_ = OpenHostDevice({}, 0);
  verbs::Nics nics_{verbs::Options()};
  verbs::DeviceSlots slots_;
};

TEST(MemoryIsRegisteredAsDmaBuf) { ExpectEqual(SlotsOfADevice().way(), std::string("dma-buf")); }

TEST(PeerMemoryIsNextBest) {
  const FaultScope fault(StrCat("call ibv_reg_dmabuf_mr errno=", EOPNOTSUPP, " count=all"));
  ExpectEqual(SlotsOfADevice().way(), std::string("peer memory"));
}

// Some kernels register a dma-buf and lose what is written to it.
TEST(MemoryThatLosesDataIsNotUsed) {
  for (const char* const damage : {"lose", "garble"}) {
    const FaultScope fault(StrCat(damage, " memory=dmabuf count=all"));
    ExpectEqual(SlotsOfADevice().way(), std::string("peer memory"));
  }
}

TEST(PinnedMemoryIsLast) {
  const FaultScope fault("lose count=all");
  const std::string way = SlotsOfADevice().way();
  ExpectContains(way, "pinned memory (dma-buf: what ");
  ExpectContains(way, "; peer memory: what host:0 (this host's memory) wrote, ");
}

WorldOptions VerbsOptions() {
  WorldOptions options{.transports = {"verbs"}};
  options.engine.slot_bytes = kSlotBytes;
  return options;
}

// Swaps of several sizes; false if an exchange fails.
bool Swaps(DeviceWorld& world) {
  for (const size_t num_bytes : {size_t{1}, kSlotBytes, kSlotBytes * 40 + 3}) {
    Part zero(0, SwapPairs(), num_bytes);
    Part one(1, SwapPairs(), num_bytes);
    for (Part* const part : {&zero, &one}) {
      part->Start(world);
      part->Done(world);
    }
    for (const int rank : {0, 1}) {
      if (!world.IsIdleWithin(rank, kLong)) return false;
    }
    if (!zero.IsFrom(1) || !one.IsFrom(0)) return false;
  }
  return true;
}

TEST(RingsGoOnWhenPathsFail) {
  for (const char* const fault :
       {"error status=12", "error status=12 after=3 count=2", "error status=12 bytes=all",
        "flush after=5", "peer_flush after=2", "ghost us=2000 after=4", "ghost us=50000 after=9",
        "delay us=20000 count=5"}) {
    DeviceWorld world(VerbsOptions());
    const uint64_t before = Softverbs::Get().num_faults_fired();
    const FaultScope scope(fault);
    ExpectTrue(Swaps(world), fault);
    ExpectTrue(Softverbs::Get().num_faults_fired() > before, fault);
  }
}

TEST(RingsGoOnWhenAPortGoesDown) {
  DeviceWorld world(VerbsOptions());
  EXPECT(Swaps(world));
  Softverbs::Get().Command("port soft0 1 down");
  EXPECT(Swaps(world));
  Softverbs::Get().Command("port soft0 1 up");
  EXPECT(Swaps(world));
}

TEST(LastPathIsAnError) {
  Part zero(0, SwapPairs(), kSlotBytes);
  Part one(1, SwapPairs(), kSlotBytes);
  DeviceWorld world(VerbsOptions());
  const FaultScope fault("error status=12 count=all");
  zero.Start(world);
  one.Start(world);
  const auto error = world.engine(0).WaitFailure(kLong);
  EXPECT(error != nullptr);
  ExpectContains(error->what(), "jaxhet.PeerError: [rank ");
  ExpectContains(error->what(), "a ring (verbs) broke: no RDMA path is left");
  ExpectContains(error->what(), "IBV_WC_RETRY_EXC_ERR");
}

}  // namespace
}  // namespace jaxhet::testing
