// Behaviour of the software libibverbs that equals that of hardware.

#include "tests/softverbs/softverbs.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "tests/cpp/testing.h"
#include "tests/softverbs/endpoint.h"

namespace jaxhet::testing {
namespace {

using std::chrono::milliseconds;

constexpr std::array<size_t, 8> kSizes = {0, 1, 7, 65535, 65536, 65537, 200001, 1 << 20};
constexpr std::string_view kLater = "delay us=1000000000";  // until it is released
constexpr std::string_view kNothing = "contexts 0 pds 0 mrs 0 cqs 0 channels 0 qps 0";

void Fill(std::vector<std::byte>& bytes, size_t seed) {
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = std::byte((i * 31 + (i >> 8) + seed) & 255);
}

bool AreEqual(Endpoint& a, Endpoint& b, size_t offset, size_t num_bytes) {
  return std::memcmp(a.bytes().data() + offset, b.bytes().data() + offset, num_bytes) == 0;
}

TEST(SoftverbsTest, DevicesHavePortsAndGids) {
  Endpoint end;
  ibv::DeviceAttr device;
  EXPECT_EQ(Verbs().query_device(end.context(), &device), 0);
  EXPECT_EQ(int{device.phys_port_cnt}, 1);
  ibv::PortAttr port;
  EXPECT_EQ(Verbs().query_port(end.context(), 1, &port), 0);
  EXPECT_EQ(port.state, ibv::kPortActive);
  EXPECT_EQ(int{port.link_layer}, int{ibv::kLinkLayerEthernet});
  EXPECT_EQ(port.gid_tbl_len, 4);
  EXPECT_EQ(Verbs().query_port(end.context(), 2, &port), EINVAL);
  ibv::GidEntry entry;
  const auto query = [&](uint32_t index) {
    return Verbs().query_gid_ex(end.context(), 1, index, &entry, 0, sizeof entry);
  };
  EXPECT_EQ(query(0), 0);
  EXPECT_EQ(entry.gid_type, uint32_t{ibv::kGidTypeRoceV1});
  EXPECT_EQ(int{entry.gid.raw[0]}, 0xfe);
  EXPECT_EQ(query(3), 0);
  EXPECT_EQ(entry.gid_type, uint32_t{ibv::kGidTypeRoceV2});
  EXPECT_EQ(int{entry.gid.raw[12]}, 127);
  EXPECT_EQ(query(4), ENODATA);
}

TEST(SoftverbsTest, TransitionsNeedTheirAttributes) {
  Endpoint end;
  ibv::QpAttr attr;
  attr.qp_state = ibv::kQpStateInit;
  attr.port_num = 1;
  constexpr int kInit = ibv::kQpState | ibv::kQpPkeyIndex | ibv::kQpPort | ibv::kQpAccessFlags;
  for (const int missing : {ibv::kQpPkeyIndex, ibv::kQpPort, ibv::kQpAccessFlags}) {
    EXPECT_EQ(end.Modify(attr, kInit & ~missing), EINVAL);
  }
  EXPECT_EQ(end.Modify(attr, kInit | ibv::kQpTimeout), EINVAL);
  attr.port_num = 2;
  EXPECT_EQ(end.Modify(attr, kInit), EINVAL);
  EXPECT_EQ(end.Receive(), EINVAL);  // not in RESET
  end.ToInit();
  EXPECT_EQ(end.Receive(), 0);
  EXPECT_EQ(end.Write(end.info(), 0, 1), EINVAL);

  attr = {};
  attr.qp_state = ibv::kQpStateRtr;
  attr.path_mtu = ibv::kMtu4096;
  attr.ah_attr.is_global = 1;
  attr.ah_attr.port_num = 1;
  attr.ah_attr.grh.dgid = end.info().gid;
  attr.ah_attr.grh.sgid_index = 3;
  constexpr int kRtr = ibv::kQpState | ibv::kQpAv | ibv::kQpPathMtu | ibv::kQpDestQpn |
                       ibv::kQpRqPsn | ibv::kQpMaxDestRdAtomic | ibv::kQpMinRnrTimer;
  for (const int missing : {ibv::kQpAv, ibv::kQpPathMtu, ibv::kQpDestQpn, ibv::kQpRqPsn,
                            ibv::kQpMaxDestRdAtomic, ibv::kQpMinRnrTimer}) {
    EXPECT_EQ(end.Modify(attr, kRtr & ~missing), EINVAL);
  }
  const auto refuses = [&](auto change) {
    ibv::QpAttr wrong = attr;
    change(wrong);
    return end.Modify(wrong, kRtr) == EINVAL;
  };
  EXPECT_TRUE(refuses([](ibv::QpAttr& a) { a.ah_attr.is_global = 0; }));
  EXPECT_TRUE(refuses([](ibv::QpAttr& a) { a.ah_attr.grh.sgid_index = 4; }));
  EXPECT_TRUE(refuses([](ibv::QpAttr& a) { a.ah_attr.grh.dgid = {}; }));
  EXPECT_TRUE(refuses([](ibv::QpAttr& a) { a.ah_attr.port_num = 2; }));
  EXPECT_TRUE(refuses([](ibv::QpAttr& a) { a.path_mtu = 0; }));
  EXPECT_TRUE(refuses([](ibv::QpAttr& a) { a.qp_state = ibv::kQpStateRts; }));
  EXPECT_EQ(end.Modify(attr, kRtr), 0);
  EXPECT_EQ(end.Modify(attr, ibv::kQpState), EINVAL);
  end.ToReadyToSend();
  EXPECT_EQ(end.State(), ibv::kQpStateRts);
}

TEST(SoftverbsTest, WritesMoveBytesOfAllSizes) {
  Pair pair;
  Fill(pair.a.bytes(), 3);
  for (const size_t num_bytes : kSizes) {
    std::ranges::fill(pair.b.bytes(), std::byte{0xEE});
    EXPECT_EQ(pair.a.Write(pair.b.info(), 0, num_bytes), 0);
    const ibv::Wc wc = pair.a.Wait();
    EXPECT_EQ(wc.status, ibv::kWcSuccess);
    EXPECT_EQ(wc.opcode, ibv::kWcRdmaWrite);
    EXPECT_TRUE(AreEqual(pair.a, pair.b, 0, num_bytes));
    EXPECT_TRUE(num_bytes == pair.b.bytes().size() || pair.b.bytes()[num_bytes] == std::byte{0xEE});
  }
  EXPECT_FALSE(pair.b.HasCompletion());
}

TEST(SoftverbsTest, ReadsBringBytesOfAllSizes) {
  Pair pair;
  Fill(pair.b.bytes(), 5);
  for (const size_t num_bytes : kSizes) {
    std::ranges::fill(pair.a.bytes(), std::byte{0xEE});
    EXPECT_EQ(pair.a.Read(pair.b.info(), 0, num_bytes), 0);
    EXPECT_EQ(pair.a.Wait().status, ibv::kWcSuccess);
    EXPECT_TRUE(AreEqual(pair.a, pair.b, 0, num_bytes));
  }
}

TEST(SoftverbsTest, ImmediateDataConsumesAReceive) {
  Pair pair;
  Fill(pair.a.bytes(), 4);
  for (const size_t num_bytes : kSizes) {
    EXPECT_EQ(pair.b.Receive(55), 0);
    EXPECT_EQ(pair.a.Write(pair.b.info(), 0, num_bytes, 0x1234), 0);
    EXPECT_EQ(pair.a.Wait().status, ibv::kWcSuccess);
    const ibv::Wc wc = pair.b.Wait();
    EXPECT_EQ(wc.wr_id, uint64_t{55});
    EXPECT_EQ(wc.opcode, ibv::kWcRecvRdmaWithImm);
    EXPECT_EQ(wc.imm_data, 0x1234U);
    EXPECT_EQ(wc.wc_flags, ibv::kWcWithImm);
    EXPECT_EQ(size_t{wc.byte_len}, num_bytes);
    EXPECT_EQ(wc.qp_num, pair.b.qp()->qp_num);
    EXPECT_TRUE(AreEqual(pair.a, pair.b, 0, num_bytes));
  }
}

TEST(SoftverbsTest, SenderWaitsForAReceive) {
  Pair pair;
  EXPECT_EQ(pair.a.Write(pair.b.info(), 0, 100, 1), 0);
  usleep(20000);
  EXPECT_FALSE(pair.a.HasCompletion());
  EXPECT_EQ(pair.b.Receive(), 0);
  EXPECT_EQ(pair.a.Wait().status, ibv::kWcSuccess);
}

TEST(SoftverbsTest, SenderThatMayNotWaitFails) {
  Pair pair({.rnr_retry = 1});
  EXPECT_EQ(pair.a.Write(pair.b.info(), 0, 100, 1), 0);
  EXPECT_EQ(pair.a.Wait().status, ibv::kWcRnrRetryExcErr);
  EXPECT_EQ(pair.a.State(), ibv::kQpStateError);
  EXPECT_EQ(pair.b.State(), ibv::kQpStateRts);
}

TEST(SoftverbsTest, SendsFillReceives) {
  Pair pair;
  Fill(pair.a.bytes(), 6);
  EXPECT_EQ(pair.b.Receive(1, 0, 100000), 0);
  EXPECT_EQ(pair.b.Receive(2, 0, 10), 0);
  EXPECT_EQ(pair.a.Send(0, 100000), 0);
  EXPECT_EQ(pair.a.Wait().status, ibv::kWcSuccess);
  const ibv::Wc wc = pair.b.Wait();
  EXPECT_EQ(wc.byte_len, 100000U);
  EXPECT_EQ(wc.opcode, ibv::kWcRecv);
  EXPECT_TRUE(AreEqual(pair.a, pair.b, 0, 100000));
  EXPECT_EQ(pair.a.Send(0, 11), 0);
  EXPECT_EQ(pair.a.Wait().status, ibv::kWcRemInvReqErr);
  EXPECT_EQ(pair.b.Wait().status, ibv::kWcLocLenErr);
  EXPECT_EQ(pair.b.State(), ibv::kQpStateError);
}

TEST(SoftverbsTest, InlineBytesAreTakenAtOnce) {
  Pair pair;
  Fill(pair.a.bytes(), 7);
  const std::vector<std::byte> before(pair.a.bytes().begin(), pair.a.bytes().begin() + 64);
  const FaultScope late(kLater);
  EXPECT_EQ(pair.a.Write(pair.b.info(), 0, 64, -1, 1, ibv::kSendSignaled | ibv::kSendInline), 0);
  std::ranges::fill(pair.a.bytes(), std::byte{0});
  Softverbs::Get().Command("release");
  EXPECT_EQ(pair.a.Wait().status, ibv::kWcSuccess);
  EXPECT_TRUE(std::ranges::equal(before, std::span(pair.b.bytes()).first(64)));
  EXPECT_EQ(pair.a.Write(pair.b.info(), 0, 65, -1, 1, ibv::kSendInline), EINVAL);
}

TEST(SoftverbsTest, BytesOfOthersAreTakenWhenTheyLeave) {
  Pair pair;
  Fill(pair.a.bytes(), 7);
  const FaultScope late(kLater);
  EXPECT_EQ(pair.a.Write(pair.b.info(), 0, 64), 0);
  std::ranges::fill(pair.a.bytes(), std::byte{9});
  Softverbs::Get().Command("release");
  EXPECT_EQ(pair.a.Wait().status, ibv::kWcSuccess);
  EXPECT_EQ(pair.b.bytes()[0], std::byte{9});
}

// A request that the peer does not allow breaks both ends.
void ExpectRefused(const EndpointOptions& options, EndpointInfo change(EndpointInfo), size_t offset,
                   size_t num_bytes) {
  Pair pair(options);
  EXPECT_EQ(pair.b.Receive(), 0);
  EXPECT_EQ(pair.a.Write(change(pair.b.info()), offset, num_bytes, 1), 0);
  EXPECT_EQ(pair.a.Wait().status, ibv::kWcRemAccessErr);
  EXPECT_EQ(pair.b.Wait().status, ibv::kWcWrFlushErr);
  EXPECT_EQ(pair.b.WaitEvent(), ibv::kEventQpAccessErr);
}

TEST(SoftverbsTest, WrongKeysAndRangesAreRefused) {
  const auto same = [](EndpointInfo info) { return info; };
  ExpectRefused({}, [](EndpointInfo info) { return ++info.rkey, info; }, 0, 8);
  ExpectRefused({}, [](EndpointInfo info) { return info.address -= 1, info; }, 0, 8);
  ExpectRefused({}, [](EndpointInfo info) { return info.address += 1, info; }, (1 << 20) - 8, 8);
  ExpectRefused({.access = ibv::kAccessLocalWrite | ibv::kAccessRemoteRead}, same, 0, 8);
  // Registered, but in the PD of another QP.
  Pair pair;
  const Endpoint other;
  EndpointInfo info = pair.b.info();
  info.rkey = other.info().rkey;
  info.address = other.info().address;
  EXPECT_EQ(pair.a.Write(info, 0, 8), 0);
  EXPECT_EQ(pair.a.Wait().status, ibv::kWcRemAccessErr);
}

TEST(SoftverbsTest, WrongLocalKeysAreRefused) {
  Pair pair;
  ibv::Sge sge = pair.a.SgeOf(0, 8);
  ++sge.lkey;
  ibv::SendWr wr;
  wr.wr_id = 77;
  wr.sg_list = &sge;
  wr.num_sge = 1;
  wr.rkey = pair.b.info().rkey;
  wr.remote_addr = pair.b.info().address;
  ibv::SendWr* bad = nullptr;
  EXPECT_EQ(VerbsApi::PostSend(pair.a.qp(), &wr, &bad), 0);
  const ibv::Wc wc = pair.a.Wait();
  EXPECT_EQ(wc.status, ibv::kWcLocProtErr);
  EXPECT_EQ(wc.wr_id, uint64_t{77});
  wr.num_sge = 3;
  EXPECT_EQ(VerbsApi::PostSend(pair.a.qp(), &wr, &bad), EINVAL);
  EXPECT_EQ(bad, &wr);
}

TEST(SoftverbsTest, RemoteWriteNeedsLocalWrite) {
  Endpoint end;
  EXPECT_EQ(Verbs().reg_mr(end.pd(), end.bytes().data(), 8, ibv::kAccessRemoteWrite), nullptr);
  EXPECT_EQ(errno, EINVAL);
  EXPECT_EQ(Verbs().dealloc_pd(end.pd()), EBUSY);
  EXPECT_EQ(Verbs().destroy_cq(end.cq()), EBUSY);
  EXPECT_EQ(Verbs().destroy_comp_channel(end.channel()), EBUSY);
  EXPECT_EQ(Verbs().close_device(end.context()), EBUSY);
}

TEST(SoftverbsTest, RoomComesBackWhenCompletionsArePolled) {
  Pair pair({.depth = 4});
  const EndpointInfo peer = pair.b.info();
  for (uint64_t i = 0; i < 3; ++i) EXPECT_EQ(pair.a.Write(peer, 0, 8, -1, i, 0), 0);
  EXPECT_EQ(pair.a.Write(peer, 0, 8, -1, 3), 0);
  usleep(20000);
  EXPECT_EQ(pair.a.Write(peer, 0, 8), ENOMEM);
  EXPECT_EQ(pair.a.Wait().wr_id, uint64_t{3});  // the others were not signaled
  for (int i = 0; i < 4; ++i) EXPECT_EQ(pair.a.Write(peer, 0, 8, -1, 1, 0), 0);
  EXPECT_EQ(pair.a.Write(peer, 0, 8), ENOMEM);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(pair.b.Receive(), 0);
  EXPECT_EQ(pair.b.Receive(), ENOMEM);
}

TEST(SoftverbsTest, QueueThatOverrunsFails) {
  Pair pair({.cqe = 2});
  for (uint64_t i = 0; i < 3; ++i) EXPECT_EQ(pair.a.Write(pair.b.info(), 0, 8), 0);
  EXPECT_EQ(pair.a.WaitEvent(), ibv::kEventCqErr);
  EXPECT_EQ(pair.a.WaitEvent(), ibv::kEventQpFatal);
  EXPECT_EQ(pair.a.Wait().status, ibv::kWcSuccess);
  EXPECT_EQ(pair.a.Wait().status, ibv::kWcSuccess);
  ibv::Wc wc;
  EXPECT_EQ(VerbsApi::PollCq(pair.a.cq(), 1, &wc), -1);
}

TEST(SoftverbsTest, ChannelWakesForWhatIsNew) {
  Pair pair;
  fcntl(pair.a.channel()->fd, F_SETFL, O_NONBLOCK);
  ibv::Cq* cq = nullptr;
  void* cq_context = nullptr;
  const auto next = [&] { return Verbs().get_cq_event(pair.a.channel(), &cq, &cq_context); };
  EXPECT_EQ(VerbsApi::RequestNotify(pair.a.cq()), 0);
  EXPECT_EQ(next(), -1);
  EXPECT_EQ(errno, EAGAIN);
  fcntl(pair.a.channel()->fd, F_SETFL, 0);
  EXPECT_EQ(pair.a.Write(pair.b.info(), 0, 8), 0);
  EXPECT_EQ(next(), 0);  // waits
  EXPECT_EQ(cq, pair.a.cq());
  EXPECT_EQ(cq_context, &pair.a);
  EXPECT_EQ(VerbsApi::RequestNotify(pair.a.cq()), 0);  // too late for the first
  fcntl(pair.a.channel()->fd, F_SETFL, O_NONBLOCK);
  usleep(20000);
  EXPECT_EQ(next(), -1);
  fcntl(pair.a.channel()->fd, F_SETFL, 0);
  EXPECT_EQ(pair.a.Write(pair.b.info(), 0, 8), 0);
  EXPECT_EQ(next(), 0);
  EXPECT_EQ(pair.a.Wait().status, ibv::kWcSuccess);
  EXPECT_EQ(pair.a.Wait().status, ibv::kWcSuccess);
  fcntl(pair.a.channel()->fd, F_SETFL, O_NONBLOCK);
  EXPECT_EQ(next(), -1);  // once only
  Verbs().ack_cq_events(pair.a.cq(), 2);
}

TEST(SoftverbsTest, ErrorStateFlushes) {
  Pair pair;
  EXPECT_EQ(pair.b.Receive(8), 0);
  ibv::QpAttr attr;
  attr.qp_state = ibv::kQpStateError;
  EXPECT_EQ(pair.b.Modify(attr, ibv::kQpState), 0);
  ibv::Wc wc = pair.b.Wait();
  EXPECT_EQ(wc.status, ibv::kWcWrFlushErr);
  EXPECT_EQ(wc.wr_id, uint64_t{8});
  EXPECT_EQ(pair.b.Receive(9), 0);
  EXPECT_EQ(pair.b.Wait().wr_id, uint64_t{9});
  EXPECT_EQ(pair.b.Write(pair.a.info(), 0, 8, -1, 10, 0), 0);  // not signaled, and yet
  wc = pair.b.Wait();
  EXPECT_EQ(wc.status, ibv::kWcWrFlushErr);
  EXPECT_EQ(wc.wr_id, uint64_t{10});
  // The peer only sees that nobody answers.
  EXPECT_EQ(pair.a.Write(pair.b.info(), 0, 8, -1, 1), 0);
  EXPECT_EQ(pair.a.Write(pair.b.info(), 0, 8, -1, 2), 0);
  EXPECT_EQ(pair.a.Wait().status, ibv::kWcRetryExcErr);
  EXPECT_EQ(pair.a.Wait().status, ibv::kWcWrFlushErr);
}

TEST(SoftverbsTest, ResetForgetsEverything) {
  Pair pair;
  EXPECT_EQ(pair.a.Write(pair.b.info(), 0, 8), 0);
  usleep(20000);
  ibv::QpAttr attr;
  attr.qp_state = ibv::kQpStateReset;
  for (Endpoint* const end : {&pair.a, &pair.b}) EXPECT_EQ(end->Modify(attr, ibv::kQpState), 0);
  EXPECT_FALSE(pair.a.HasCompletion());
  pair.a.Connect(pair.b.info());
  pair.b.Connect(pair.a.info());
  EXPECT_EQ(pair.a.Write(pair.b.info(), 0, 8), 0);
  EXPECT_EQ(pair.a.Wait().status, ibv::kWcSuccess);
}

TEST(SoftverbsTest, SenderMayComeBeforeThePeer) {
  Endpoint a;
  Endpoint b;
  a.Connect(b.info());
  Softverbs::Get().Command("retry 300000");
  EXPECT_EQ(a.Write(b.info(), 0, 8), 0);
  usleep(3000);
  b.ToInit();
  b.ToReadyToReceive(a.info());
  EXPECT_EQ(a.Wait().status, ibv::kWcSuccess);
  Softverbs::Get().Command("retry 5000");
  EXPECT_EQ(b.WaitEvent(), ibv::kEventCommEst);
}

// On hardware these are the mistakes that end in a timeout.
TEST(SoftverbsTest, WrongAddressesAreLost) {
  const auto fails = [](auto change) {
    Endpoint a;
    Endpoint b;
    EndpointInfo peer = b.info();
    change(peer);
    a.Connect(peer);
    b.Connect(a.info());
    EXPECT_EQ(a.Write(b.info(), 0, 8), 0);
    return a.Wait().status == ibv::kWcRetryExcErr;
  };
  EXPECT_TRUE(fails([](EndpointInfo& peer) { peer.gid.raw[15] = 99; }));
  EXPECT_TRUE(fails([](EndpointInfo& peer) { peer.qpn ^= 1; }));
  EXPECT_TRUE(fails([](EndpointInfo& peer) { peer.qpn ^= 1 << 20; }));  // another process
}

TEST(SoftverbsTest, RequestsOfAQpCompleteInOrder) {
  Pair pair({.depth = 64});
  for (uint64_t i = 0; i < 50; ++i) {
    EXPECT_EQ(pair.a.Write(pair.b.info(), 0, (i % 3) * 70000, -1, i), 0);
  }
  for (uint64_t i = 0; i < 50; ++i) EXPECT_EQ(pair.a.Wait().wr_id, i);
}

TEST(SoftverbsTest, NothingIsLeft) {
  EXPECT_EQ(std::string_view(Softverbs::Get().Objects()), kNothing);
}

// The other process: writes its buffer to the parent's, and reads the parent's.
int RunChild(int socket) {
  Endpoint end;
  EndpointInfo own = end.info();
  EndpointInfo peer{};
  if (write(socket, &own, sizeof own) < 0 || read(socket, &peer, sizeof peer) < 0) return 2;
  end.Connect(peer);
  Fill(end.bytes(), 1);
  if (end.Write(peer, 0, 500000, 9) != 0 || end.Wait().status != ibv::kWcSuccess) return 3;
  if (end.Read(peer, 600000, 300000) != 0 || end.Wait().status != ibv::kWcSuccess) return 4;
  for (size_t i = 600000; i < 900000; ++i) {
    if (end.bytes()[i] != std::byte((i * 31 + (i >> 8) + 2) & 255)) return 5;
  }
  if (write(socket, "!", 1) != 1) return 6;
  return end.WaitEvent() == ibv::kEventPortErr ? 0 : 7;
}

TEST(SoftverbsTest, ProcessesReachEachOther) {
  std::array<int, 2> sockets{};
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets.data()), 0);
  Softverbs::Get();  // both are of one fabric; no device is open: there is no thread
  const pid_t child = StartChild([&] { return RunChild(sockets[1]); });
  {
    Endpoint end;
    Fill(end.bytes(), 2);
    EndpointInfo own = end.info();
    EndpointInfo peer{};
    EXPECT_EQ(read(sockets[0], &peer, sizeof peer), ssize_t{sizeof peer});
    end.Connect(peer);
    EXPECT_EQ(end.Receive(), 0);
    EXPECT_EQ(write(sockets[0], &own, sizeof own), ssize_t{sizeof own});
    EXPECT_EQ(end.Wait().imm_data, 9U);
    std::vector<std::byte> expected(end.bytes().size());
    Fill(expected, 1);
    EXPECT_EQ(std::memcmp(end.bytes().data(), expected.data(), 500000), 0);
    char is_done = 0;
    EXPECT_EQ(read(sockets[0], &is_done, 1), ssize_t{1});
    Softverbs::Get().Command("all port soft0 1 down");
    EXPECT_EQ(WaitForChild(child), 0);
    Softverbs::Get().Command("port soft0 1 up");
    // The other process has ended.
    EXPECT_EQ(end.Write(peer, 0, 8), 0);
    EXPECT_EQ(end.Wait().status, ibv::kWcRetryExcErr);
  }
  for (const int socket : sockets) close(socket);
}

}  // namespace
}  // namespace jaxhet::testing
