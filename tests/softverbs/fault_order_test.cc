// Each fault of the software libibverbs does what it says.

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "tests/cpp/testing.h"
#include "tests/softverbs/endpoint.h"
#include "tests/softverbs/softverbs.h"
#include "xla_plugin/base/fd.h"
#include "xla_plugin/base/strings.h"

namespace jaxhet::testing {
namespace {

using ::testing::HasSubstr;

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// How many of the buffer's bytes, from the first on, are `value`.
size_t Arrived(Endpoint& end, std::byte value) {
  const auto& bytes = end.bytes();
  return static_cast<size_t>(std::ranges::find_if(bytes, [=](std::byte b) { return b != value; }) -
                             bytes.begin());
}

constexpr std::byte kSent{0x5A};

// A pair whose sender's buffer is kSent.
struct Sender : Pair {
  Sender() { std::ranges::fill(a.bytes(), kSent); }
};

TEST(FaultOrderTest, WrongCommandsAreRefused) {
  const auto problem = [](const char* text) {
    return ThrownText([&] { Softverbs::Get().Command(text); });
  };
  EXPECT_THAT(problem("erorr status=12"), HasSubstr("no command erorr"));
  EXPECT_THAT(problem("error state=12"), HasSubstr("no option state"));
  EXPECT_THAT(problem("error status=twelve"), HasSubstr("'twelve' is no number"));
  EXPECT_THAT(problem("port soft7 1 down"), HasSubstr("no device soft7"));
  EXPECT_THAT(problem("port soft0 2 down"), HasSubstr("no port 2"));
  EXPECT_THAT(problem("gid soft0 1 9 remove"), HasSubstr("no such GID"));
  EXPECT_THAT(problem("break 5"), HasSubstr("no such QP"));
  EXPECT_THAT(problem("call errno=5"), HasSubstr("an argument is missing"));
  Softverbs::Get().Command("clear");
}

TEST(FaultOrderTest, ErrorComesWhenOrdered) {
  Sender pair;
  const uint64_t before = Softverbs::Get().num_faults_fired();
  const FaultScope fault(StrCat("error status=", ibv::kWcRetryExcErr, " after=2 opcode=",
                                ibv::kWrRdmaWrite, " qpn=", pair.a.qp()->qp_num));
  EXPECT_EQ(pair.b.Receive(), 0);
  for (uint64_t i = 0; i < 2; ++i) EXPECT_EQ(pair.a.Write(pair.b.info(), 0, 8, -1, i), 0);
  EXPECT_EQ(pair.a.Write(pair.b.info(), 0, 8, 1, 2), 0);  // another opcode
  for (uint64_t i = 3; i < 5; ++i) EXPECT_EQ(pair.a.Write(pair.b.info(), 0, 8, -1, i, 0), 0);
  for (uint64_t i = 0; i < 3; ++i) EXPECT_EQ(pair.a.Wait().status, ibv::kWcSuccess);
  const ibv::Wc wc = pair.a.Wait();
  EXPECT_EQ(wc.wr_id, uint64_t{3});
  EXPECT_EQ(wc.status, ibv::kWcRetryExcErr);
  EXPECT_EQ(pair.a.Wait().status, ibv::kWcWrFlushErr);
  EXPECT_EQ(pair.a.State(), ibv::kQpStateError);
  EXPECT_EQ(Softverbs::Get().num_faults_fired() - before, uint64_t{1});
}

TEST(FaultOrderTest, ErrorLeavesAPart) {
  for (const size_t part : {size_t{0}, size_t{1}, size_t{70000}, size_t{199999}}) {
    Sender pair;
    const FaultScope fault(StrCat("error status=", ibv::kWcRetryExcErr, " bytes=", part));
    EXPECT_EQ(pair.b.Receive(), 0);
    EXPECT_EQ(pair.a.Write(pair.b.info(), 0, 200000, 1), 0);
    EXPECT_EQ(pair.a.Wait().status, ibv::kWcRetryExcErr);
    EXPECT_EQ(Arrived(pair.b, kSent), part);
    EXPECT_FALSE(pair.b.HasCompletion());
  }
}

// The same happens when the last acknowledgement is lost.
TEST(FaultOrderTest, ErrorComesAfterAllWasDone) {
  Sender pair;
  const FaultScope fault(StrCat("error bytes=all status=", ibv::kWcRetryExcErr));
  EXPECT_EQ(pair.b.Receive(), 0);
  EXPECT_EQ(pair.a.Write(pair.b.info(), 0, 200000, 1), 0);
  EXPECT_EQ(pair.a.Wait().status, ibv::kWcRetryExcErr);
  EXPECT_EQ(pair.b.Wait().status, ibv::kWcSuccess);
  EXPECT_EQ(Arrived(pair.b, kSent), size_t{200000});
}

TEST(FaultOrderTest, GhostsArriveLate) {
  Sender pair;
  const FaultScope fault("ghost us=1000000000");
  for (int i = 0; i < 2; ++i) EXPECT_EQ(pair.b.Receive(), 0);
  EXPECT_EQ(pair.a.Write(pair.b.info(), 0, 200000, 1), 0);
  EXPECT_EQ(pair.a.Wait().status, ibv::kWcRetryExcErr);
  EXPECT_FALSE(pair.b.HasCompletion());
  EXPECT_EQ(Arrived(pair.b, kSent), size_t{0});
  std::ranges::fill(pair.a.bytes(), std::byte{1});  // packets that have left keep their bytes
  Softverbs::Get().Command("release");
  EXPECT_EQ(pair.b.Wait().imm_data, 1U);
  EXPECT_EQ(Arrived(pair.b, kSent), size_t{200000});
}

TEST(FaultOrderTest, GhostsOfAClosedConnectionAreLost) {
  Sender pair;
  const FaultScope fault("ghost us=10000");
  EXPECT_EQ(pair.a.Write(pair.b.info(), 0, 1000), 0);
  EXPECT_EQ(pair.a.Wait().status, ibv::kWcRetryExcErr);
  ibv::QpAttr attr;
  attr.qp_state = ibv::kQpStateError;
  EXPECT_EQ(pair.b.Modify(attr, ibv::kQpState), 0);
  usleep(30000);
  EXPECT_EQ(Arrived(pair.b, kSent), size_t{0});
}

TEST(FaultOrderTest, DelaysHoldBack) {
  Sender pair;
  const FaultScope fault("delay us=50000");
  const auto begin = Clock::now();
  EXPECT_EQ(pair.a.Write(pair.b.info(), 0, 8), 0);
  EXPECT_EQ(pair.a.Wait().status, ibv::kWcSuccess);
  EXPECT_GE(Clock::now() - begin, milliseconds(50));
}

// Nothing orders the completions of two QPs; those of one stay in order.
TEST(FaultOrderTest, JitterReordersQps) {
  Sender first;
  Sender second;
  const FaultScope jitter("jitter 2000 seed=3");
  int swaps = 0;
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(first.a.Write(first.b.info(), 0, 8), 0);
    EXPECT_EQ(second.a.Write(second.b.info(), 0, 8), 0);
    while (true) {
      if (first.a.HasCompletion()) {
        second.a.Wait();
        break;
      }
      if (!second.a.HasCompletion()) continue;
      ++swaps;
      first.a.Wait();
      break;
    }
  }
  EXPECT_TRUE(swaps > 0 && swaps < 20);
}

TEST(FaultOrderTest, QpsBreakOnOrder) {
  Sender pair;
  EXPECT_EQ(pair.a.Receive(5), 0);
  Softverbs::Get().Command(StrCat("break ", pair.a.qp()->qp_num));  // while it is idle
  EXPECT_EQ(pair.a.WaitEvent(), ibv::kEventQpFatal);
  EXPECT_EQ(pair.a.Wait().status, ibv::kWcWrFlushErr);
  EXPECT_EQ(pair.a.State(), ibv::kQpStateError);

  Sender busy;
  const FaultScope fault("flush");
  EXPECT_EQ(busy.a.Write(busy.b.info(), 0, 8), 0);
  EXPECT_EQ(busy.a.Wait().status, ibv::kWcWrFlushErr);
  EXPECT_EQ(busy.a.WaitEvent(), ibv::kEventQpFatal);
}

TEST(FaultOrderTest, PeersBreakOnOrder) {
  Sender pair;
  const FaultScope fault("peer_flush after=1");
  EXPECT_EQ(pair.b.Receive(), 0);
  EXPECT_EQ(pair.b.Receive(), 0);
  EXPECT_EQ(pair.a.Write(pair.b.info(), 0, 8, 1), 0);
  EXPECT_EQ(pair.a.Wait().status, ibv::kWcSuccess);
  EXPECT_EQ(pair.b.Wait().status, ibv::kWcSuccess);
  EXPECT_EQ(pair.a.Write(pair.b.info(), 0, 8, 2), 0);
  EXPECT_EQ(pair.a.Wait().status, ibv::kWcRetryExcErr);
  EXPECT_EQ(pair.b.Wait().status, ibv::kWcWrFlushErr);
  EXPECT_EQ(pair.b.WaitEvent(), ibv::kEventQpFatal);
}

TEST(FaultOrderTest, PortsAreLost) {
  Sender pair;
  Softverbs::Get().Command("port soft0 1 down");
  EXPECT_EQ(pair.a.WaitEvent(), ibv::kEventPortErr);
  ibv::PortAttr port;
  EXPECT_EQ(Verbs().query_port(pair.a.context(), 1, &port), 0);
  EXPECT_EQ(port.state, ibv::kPortDown);
  for (uint64_t i = 1; i < 3; ++i) EXPECT_EQ(pair.a.Write(pair.b.info(), 0, 8, -1, i), 0);
  EXPECT_EQ(pair.a.Wait().status, ibv::kWcRetryExcErr);
  EXPECT_EQ(pair.a.Wait().status, ibv::kWcWrFlushErr);
  Softverbs::Get().Command("port soft0 1 up");
  EXPECT_EQ(pair.a.WaitEvent(), ibv::kEventPortActive);
}

TEST(FaultOrderTest, PortsThatComeBackInTimeAreNoFault) {
  Sender pair;
  Softverbs::Get().Command("retry 300000; port soft0 1 down");
  EXPECT_EQ(pair.a.Write(pair.b.info(), 0, 8), 0);
  usleep(10000);
  Softverbs::Get().Command("port soft0 1 up; retry 5000");
  EXPECT_EQ(pair.a.Wait().status, ibv::kWcSuccess);
}

TEST(FaultOrderTest, GidsAreRemoved) {
  Sender pair;
  Softverbs::Get().Command("gid soft0 1 3 remove");
  EXPECT_EQ(pair.a.WaitEvent(), ibv::kEventGidChange);
  ibv::GidEntry entry;
  EXPECT_EQ(Verbs().query_gid_ex(pair.a.context(), 1, 3, &entry, 0, sizeof entry), ENODATA);
  ibv::Gid gid;
  EXPECT_EQ(Verbs().query_gid(pair.a.context(), 1, 3, &gid), 0);
  EXPECT_EQ(gid, ibv::Gid{});
  EXPECT_EQ(pair.a.Write(pair.b.info(), 0, 8), 0);
  EXPECT_EQ(pair.a.Wait().status, ibv::kWcRetryExcErr);
  Softverbs::Get().Command("gid soft0 1 3 add");
}

TEST(FaultOrderTest, CallsFailOnOrder) {
  Endpoint end;
  const FaultScope fault(StrCat("call ibv_reg_mr errno=", ENOMEM,
                                " after=1; call ibv_modify_qp errno=", ETIMEDOUT,
                                "; call ibv_create_qp device=soft1 errno=", ENOSPC));
  ibv::Mr* const mr = Verbs().reg_mr(end.pd(), end.bytes().data(), 8, 0);
  EXPECT_NE(mr, nullptr);
  EXPECT_EQ(Verbs().reg_mr_iova2(end.pd(), end.bytes().data(), 8, 0, 0), nullptr);
  EXPECT_EQ(errno, ENOMEM);
  EXPECT_EQ(Verbs().dereg_mr(mr), 0);
  EXPECT_EQ(end.Modify({}, 0), ETIMEDOUT);
  EXPECT_THAT(ThrownText([] { const Endpoint other({.device = "soft1"}); }),
              HasSubstr("No space left on device"));
}

// Shared memory stands for a GPU's.
struct Dmabuf {
  explicit Dmabuf(Endpoint& end) {
    EXPECT_EQ(ftruncate(file.get(), kBytes), 0);
    memory = static_cast<std::byte*>(
        mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0));
    mr = Verbs().reg_dmabuf_mr(end.pd(), kOffset, kBytes - kOffset, kAddress, file.get(),
                               ibv::kAccessLocalWrite | ibv::kAccessRemoteWrite);
  }
  ~Dmabuf() {
    if (mr != nullptr) Verbs().dereg_mr(mr);
    munmap(memory, kBytes);
  }

  static constexpr size_t kBytes = 1 << 16;
  static constexpr size_t kOffset = 100;
  static constexpr uint64_t kAddress = 0x7000;
  Fd file{memfd_create("dmabuf", MFD_CLOEXEC)};
  std::byte* memory = nullptr;
  ibv::Mr* mr = nullptr;
};

// Writes 9 bytes to byte 50 of the dma-buf's region.
int WriteTo(const Dmabuf& dmabuf, Sender& pair) {
  EndpointInfo target = pair.b.info();
  target.rkey = dmabuf.mr->rkey;
  target.address = Dmabuf::kAddress + 50;
  EXPECT_EQ(pair.a.Write(target, 0, 9), 0);
  return pair.a.Wait().status;
}

TEST(FaultOrderTest, DmabufsAreWritten) {
  Sender pair;
  const Dmabuf dmabuf(pair.b);
  EXPECT_EQ(WriteTo(dmabuf, pair), ibv::kWcSuccess);
  const std::byte* const at = dmabuf.memory + Dmabuf::kOffset + 50;
  EXPECT_TRUE(at[-1] == std::byte{0} && at[0] == kSent && at[8] == kSent && at[9] == std::byte{0});
}

TEST(FaultOrderTest, DmabufsAreRefused) {
  Sender pair;
  const FaultScope fault(StrCat("call ibv_reg_dmabuf_mr errno=", EOPNOTSUPP));
  const Dmabuf dmabuf(pair.b);
  EXPECT_EQ(dmabuf.mr, nullptr);
  EXPECT_EQ(errno, EOPNOTSUPP);
}

// Whoever knows how to copy a GPU's memory does it; its dma-buf is not mapped.
TEST(FaultOrderTest, MemoryOfDevicesIsCopiedByOthers) {
  static std::atomic<size_t> num_bytes = 0;
  Sender pair;
  Softverbs::Get().SetCopy([](void* to, const void* from, size_t count) {
    num_bytes += count;
    std::memcpy(to, from, count);
  });
  std::vector<std::byte> device(200'000);
  ibv::Mr* const mr = Verbs().reg_dmabuf_mr(pair.b.pd(), 0, device.size(),
                                            reinterpret_cast<uintptr_t>(device.data()), -1,
                                            ibv::kAccessLocalWrite | ibv::kAccessRemoteWrite);
  EndpointInfo target = pair.b.info();
  target.rkey = mr->rkey;
  target.address = reinterpret_cast<uintptr_t>(device.data());
  EXPECT_EQ(pair.a.Write(target, 0, device.size()), 0);
  EXPECT_EQ(pair.a.Wait().status, ibv::kWcSuccess);
  Softverbs::Get().SetCopy(nullptr);
  EXPECT_EQ(num_bytes.load(), 2 * device.size());
  EXPECT_TRUE(std::ranges::all_of(device, [](std::byte b) { return b == kSent; }));
  EXPECT_EQ(Verbs().dereg_mr(mr), 0);
}

TEST(FaultOrderTest, DevicesCopyMemory) {
  Sender pair;
  Softverbs::Get().Command("copy host");
  EXPECT_EQ(pair.a.Write(pair.b.info(), 0, 9), 0);
  EXPECT_EQ(pair.a.Wait().status, ibv::kWcSuccess);
  Softverbs::Get().SetCopy(nullptr);
  EXPECT_EQ(Arrived(pair.b, kSent), size_t{9});
  EXPECT_THAT(ThrownText([] { Softverbs::Get().Command("copy moon"); }), HasSubstr("moon"));
}

// Some kernels lose what a NIC writes to an AMD GPU, and say that all is well.
TEST(FaultOrderTest, DmabufsLoseData) {
  Sender pair;
  const Dmabuf dmabuf(pair.b);
  const std::byte* const at = dmabuf.memory + Dmabuf::kOffset + 50;
  {
    const FaultScope fault("lose memory=dmabuf count=all");
    EXPECT_EQ(WriteTo(dmabuf, pair), ibv::kWcSuccess);
    EXPECT_TRUE(
        std::ranges::all_of(std::span(at, 9), [](std::byte b) { return b == std::byte{0}; }));
    EXPECT_EQ(pair.a.Write(pair.b.info(), 0, 9), 0);  // memory of the host
    EXPECT_EQ(pair.a.Wait().status, ibv::kWcSuccess);
    EXPECT_EQ(Arrived(pair.b, kSent), size_t{9});
  }
  const FaultScope fault("garble memory=dmabuf");
  EXPECT_EQ(WriteTo(dmabuf, pair), ibv::kWcSuccess);
  EXPECT_EQ(std::ranges::count(std::span(at, 9), kSent), ptrdiff_t{8});
}

}  // namespace
}  // namespace jaxhet::testing
