// Behaviour of the software libibverbs that equals that of hardware.

#include "tests/softverbs/softverbs.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/wait.h>
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

TEST(DevicesHavePortsAndGids) {
  Endpoint end;
  ibv::DeviceAttr device;
  ExpectEqual(Verbs().query_device(end.context(), &device), 0);
  ExpectEqual(int{device.phys_port_cnt}, 1);
  ibv::PortAttr port;
  ExpectEqual(Verbs().query_port(end.context(), 1, &port), 0);
  ExpectEqual(port.state, ibv::kPortActive);
  ExpectEqual(int{port.link_layer}, int{ibv::kLinkLayerEthernet});
  ExpectEqual(port.gid_tbl_len, 4);
  ExpectEqual(Verbs().query_port(end.context(), 2, &port), EINVAL);
  ibv::GidEntry entry;
  const auto query = [&](uint32_t index) {
    return Verbs().query_gid_ex(end.context(), 1, index, &entry, 0, sizeof entry);
  };
  ExpectEqual(query(0), 0);
  ExpectEqual(entry.gid_type, uint32_t{ibv::kGidTypeRoceV1});
  ExpectEqual(int{entry.gid.raw[0]}, 0xfe);
  ExpectEqual(query(3), 0);
  ExpectEqual(entry.gid_type, uint32_t{ibv::kGidTypeRoceV2});
  ExpectEqual(int{entry.gid.raw[12]}, 127);
  ExpectEqual(query(4), ENODATA);
}

TEST(TransitionsNeedTheirAttributes) {
  Endpoint end;
  ibv::QpAttr attr;
  attr.qp_state = ibv::kQpStateInit;
  attr.port_num = 1;
  constexpr int kInit = ibv::kQpState | ibv::kQpPkeyIndex | ibv::kQpPort | ibv::kQpAccessFlags;
  for (const int missing : {ibv::kQpPkeyIndex, ibv::kQpPort, ibv::kQpAccessFlags}) {
    ExpectEqual(end.Modify(attr, kInit & ~missing), EINVAL);
  }
  ExpectEqual(end.Modify(attr, kInit | ibv::kQpTimeout), EINVAL);
  attr.port_num = 2;
  ExpectEqual(end.Modify(attr, kInit), EINVAL);
  ExpectEqual(end.Receive(), EINVAL);  // not in RESET
  end.ToInit();
  ExpectEqual(end.Receive(), 0);
  ExpectEqual(end.Write(end.info(), 0, 1), EINVAL);

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
    ExpectEqual(end.Modify(attr, kRtr & ~missing), EINVAL);
  }
  const auto refuses = [&](auto change) {
    ibv::QpAttr wrong = attr;
    change(wrong);
    return end.Modify(wrong, kRtr) == EINVAL;
  };
  EXPECT(refuses([](ibv::QpAttr& a) { a.ah_attr.is_global = 0; }));
  EXPECT(refuses([](ibv::QpAttr& a) { a.ah_attr.grh.sgid_index = 4; }));
  EXPECT(refuses([](ibv::QpAttr& a) { a.ah_attr.grh.dgid = {}; }));
  EXPECT(refuses([](ibv::QpAttr& a) { a.ah_attr.port_num = 2; }));
  EXPECT(refuses([](ibv::QpAttr& a) { a.path_mtu = 0; }));
  EXPECT(refuses([](ibv::QpAttr& a) { a.qp_state = ibv::kQpStateRts; }));
  ExpectEqual(end.Modify(attr, kRtr), 0);
  ExpectEqual(end.Modify(attr, ibv::kQpState), EINVAL);
  end.ToReadyToSend();
  ExpectEqual(end.State(), ibv::kQpStateRts);
}

TEST(WritesMoveBytesOfAllSizes) {
  Pair pair;
  Fill(pair.a.bytes(), 3);
  for (const size_t num_bytes : kSizes) {
    std::ranges::fill(pair.b.bytes(), std::byte{0xEE});
    ExpectEqual(pair.a.Write(pair.b.info(), 0, num_bytes), 0);
    const ibv::Wc wc = pair.a.Wait();
    ExpectEqual(wc.status, ibv::kWcSuccess);
    ExpectEqual(wc.opcode, ibv::kWcRdmaWrite);
    EXPECT(AreEqual(pair.a, pair.b, 0, num_bytes));
    EXPECT(num_bytes == pair.b.bytes().size() || pair.b.bytes()[num_bytes] == std::byte{0xEE});
  }
  EXPECT(!pair.b.HasCompletion());
}

TEST(ReadsBringBytesOfAllSizes) {
  Pair pair;
  Fill(pair.b.bytes(), 5);
  for (const size_t num_bytes : kSizes) {
    std::ranges::fill(pair.a.bytes(), std::byte{0xEE});
    ExpectEqual(pair.a.Read(pair.b.info(), 0, num_bytes), 0);
    ExpectEqual(pair.a.Wait().status, ibv::kWcSuccess);
    EXPECT(AreEqual(pair.a, pair.b, 0, num_bytes));
  }
}

TEST(ImmediateDataConsumesAReceive) {
  Pair pair;
  Fill(pair.a.bytes(), 4);
  for (const size_t num_bytes : kSizes) {
    ExpectEqual(pair.b.Receive(55), 0);
    ExpectEqual(pair.a.Write(pair.b.info(), 0, num_bytes, 0x1234), 0);
    ExpectEqual(pair.a.Wait().status, ibv::kWcSuccess);
    const ibv::Wc wc = pair.b.Wait();
    ExpectEqual(wc.wr_id, uint64_t{55});
    ExpectEqual(wc.opcode, ibv::kWcRecvRdmaWithImm);
    ExpectEqual(wc.imm_data, 0x1234U);
    ExpectEqual(wc.wc_flags, ibv::kWcWithImm);
    ExpectEqual(size_t{wc.byte_len}, num_bytes);
    ExpectEqual(wc.qp_num, pair.b.qp()->qp_num);
    EXPECT(AreEqual(pair.a, pair.b, 0, num_bytes));
  }
}

TEST(SenderWaitsForAReceive) {
  Pair pair;
  ExpectEqual(pair.a.Write(pair.b.info(), 0, 100, 1), 0);
  usleep(20000);
  EXPECT(!pair.a.HasCompletion());
  ExpectEqual(pair.b.Receive(), 0);
  ExpectEqual(pair.a.Wait().status, ibv::kWcSuccess);
}

TEST(SenderThatMayNotWaitFails) {
  Pair pair({.rnr_retry = 1});
  ExpectEqual(pair.a.Write(pair.b.info(), 0, 100, 1), 0);
  ExpectEqual(pair.a.Wait().status, ibv::kWcRnrRetryExcErr);
  ExpectEqual(pair.a.State(), ibv::kQpStateError);
  ExpectEqual(pair.b.State(), ibv::kQpStateRts);
}

TEST(SendsFillReceives) {
  Pair pair;
  Fill(pair.a.bytes(), 6);
  ExpectEqual(pair.b.Receive(1, 0, 100000), 0);
  ExpectEqual(pair.b.Receive(2, 0, 10), 0);
  ExpectEqual(pair.a.Send(0, 100000), 0);
  ExpectEqual(pair.a.Wait().status, ibv::kWcSuccess);
  const ibv::Wc wc = pair.b.Wait();
  ExpectEqual(wc.byte_len, 100000U);
  ExpectEqual(wc.opcode, ibv::kWcRecv);
  EXPECT(AreEqual(pair.a, pair.b, 0, 100000));
  ExpectEqual(pair.a.Send(0, 11), 0);
  ExpectEqual(pair.a.Wait().status, ibv::kWcRemInvReqErr);
  ExpectEqual(pair.b.Wait().status, ibv::kWcLocLenErr);
  ExpectEqual(pair.b.State(), ibv::kQpStateError);
}

TEST(InlineBytesAreTakenAtOnce) {
  Pair pair;
  Fill(pair.a.bytes(), 7);
  const std::vector<std::byte> before(pair.a.bytes().begin(), pair.a.bytes().begin() + 64);
  const FaultScope late(kLater);
  ExpectEqual(pair.a.Write(pair.b.info(), 0, 64, -1, 1, ibv::kSendSignaled | ibv::kSendInline), 0);
  std::ranges::fill(pair.a.bytes(), std::byte{0});
  Softverbs::Get().Command("release");
  ExpectEqual(pair.a.Wait().status, ibv::kWcSuccess);
  EXPECT(std::ranges::equal(before, std::span(pair.b.bytes()).first(64)));
  ExpectEqual(pair.a.Write(pair.b.info(), 0, 65, -1, 1, ibv::kSendInline), EINVAL);
}

TEST(BytesOfOthersAreTakenWhenTheyLeave) {
  Pair pair;
  Fill(pair.a.bytes(), 7);
  const FaultScope late(kLater);
  ExpectEqual(pair.a.Write(pair.b.info(), 0, 64), 0);
  std::ranges::fill(pair.a.bytes(), std::byte{9});
  Softverbs::Get().Command("release");
  ExpectEqual(pair.a.Wait().status, ibv::kWcSuccess);
  EXPECT(pair.b.bytes()[0] == std::byte{9});
}

// A request that the peer does not allow breaks both ends.
void ExpectRefused(const EndpointOptions& options, EndpointInfo change(EndpointInfo), size_t offset,
                   size_t num_bytes) {
  Pair pair(options);
  ExpectEqual(pair.b.Receive(), 0);
  ExpectEqual(pair.a.Write(change(pair.b.info()), offset, num_bytes, 1), 0);
  ExpectEqual(pair.a.Wait().status, ibv::kWcRemAccessErr);
  ExpectEqual(pair.b.Wait().status, ibv::kWcWrFlushErr);
  ExpectEqual(pair.b.WaitEvent(), ibv::kEventQpAccessErr);
}

TEST(WrongKeysAndRangesAreRefused) {
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
  ExpectEqual(pair.a.Write(info, 0, 8), 0);
  ExpectEqual(pair.a.Wait().status, ibv::kWcRemAccessErr);
}

TEST(WrongLocalKeysAreRefused) {
  Pair pair;
  ibv::Sge piece = pair.a.Piece(0, 8);
  ++piece.lkey;
  ibv::SendWr wr;
  wr.wr_id = 77;
  wr.sg_list = &piece;
  wr.num_sge = 1;
  wr.rkey = pair.b.info().rkey;
  wr.remote_addr = pair.b.info().address;
  ibv::SendWr* bad = nullptr;
  ExpectEqual(VerbsApi::PostSend(pair.a.qp(), &wr, &bad), 0);
  const ibv::Wc wc = pair.a.Wait();
  ExpectEqual(wc.status, ibv::kWcLocProtErr);
  ExpectEqual(wc.wr_id, uint64_t{77});
  wr.num_sge = 3;
  ExpectEqual(VerbsApi::PostSend(pair.a.qp(), &wr, &bad), EINVAL);
  EXPECT(bad == &wr);
}

TEST(RemoteWriteNeedsLocalWrite) {
  Endpoint end;
  EXPECT(Verbs().reg_mr(end.pd(), end.bytes().data(), 8, ibv::kAccessRemoteWrite) == nullptr);
  ExpectEqual(errno, EINVAL);
  ExpectEqual(Verbs().dealloc_pd(end.pd()), EBUSY);
  ExpectEqual(Verbs().destroy_cq(end.cq()), EBUSY);
  ExpectEqual(Verbs().destroy_comp_channel(end.channel()), EBUSY);
  ExpectEqual(Verbs().close_device(end.context()), EBUSY);
}

TEST(RoomComesBackWhenCompletionsArePolled) {
  Pair pair({.depth = 4});
  const EndpointInfo peer = pair.b.info();
  for (uint64_t i = 0; i < 3; ++i) ExpectEqual(pair.a.Write(peer, 0, 8, -1, i, 0), 0);
  ExpectEqual(pair.a.Write(peer, 0, 8, -1, 3), 0);
  usleep(20000);
  ExpectEqual(pair.a.Write(peer, 0, 8), ENOMEM);
  ExpectEqual(pair.a.Wait().wr_id, uint64_t{3});  // the others were not signaled
  for (int i = 0; i < 4; ++i) ExpectEqual(pair.a.Write(peer, 0, 8, -1, 1, 0), 0);
  ExpectEqual(pair.a.Write(peer, 0, 8), ENOMEM);
  for (int i = 0; i < 4; ++i) ExpectEqual(pair.b.Receive(), 0);
  ExpectEqual(pair.b.Receive(), ENOMEM);
}

TEST(QueueThatOverrunsFails) {
  Pair pair({.cqe = 2});
  for (uint64_t i = 0; i < 3; ++i) ExpectEqual(pair.a.Write(pair.b.info(), 0, 8), 0);
  ExpectEqual(pair.a.WaitEvent(), ibv::kEventCqErr);
  ExpectEqual(pair.a.WaitEvent(), ibv::kEventQpFatal);
  ExpectEqual(pair.a.Wait().status, ibv::kWcSuccess);
  ExpectEqual(pair.a.Wait().status, ibv::kWcSuccess);
  ibv::Wc wc;
  ExpectEqual(VerbsApi::PollCq(pair.a.cq(), 1, &wc), -1);
}

TEST(ChannelWakesForWhatIsNew) {
  Pair pair;
  fcntl(pair.a.channel()->fd, F_SETFL, O_NONBLOCK);
  ibv::Cq* cq = nullptr;
  void* cq_context = nullptr;
  const auto next = [&] { return Verbs().get_cq_event(pair.a.channel(), &cq, &cq_context); };
  ExpectEqual(VerbsApi::RequestNotify(pair.a.cq()), 0);
  ExpectEqual(next(), -1);
  ExpectEqual(errno, EAGAIN);
  fcntl(pair.a.channel()->fd, F_SETFL, 0);
  ExpectEqual(pair.a.Write(pair.b.info(), 0, 8), 0);
  ExpectEqual(next(), 0);  // waits
  EXPECT(cq == pair.a.cq());
  EXPECT(cq_context == &pair.a);
  ExpectEqual(VerbsApi::RequestNotify(pair.a.cq()), 0);  // too late for the first
  fcntl(pair.a.channel()->fd, F_SETFL, O_NONBLOCK);
  usleep(20000);
  ExpectEqual(next(), -1);
  fcntl(pair.a.channel()->fd, F_SETFL, 0);
  ExpectEqual(pair.a.Write(pair.b.info(), 0, 8), 0);
  ExpectEqual(next(), 0);
  ExpectEqual(pair.a.Wait().status, ibv::kWcSuccess);
  ExpectEqual(pair.a.Wait().status, ibv::kWcSuccess);
  fcntl(pair.a.channel()->fd, F_SETFL, O_NONBLOCK);
  ExpectEqual(next(), -1);  // once only
  Verbs().ack_cq_events(pair.a.cq(), 2);
}

TEST(ErrorStateFlushes) {
  Pair pair;
  ExpectEqual(pair.b.Receive(8), 0);
  ibv::QpAttr attr;
  attr.qp_state = ibv::kQpStateError;
  ExpectEqual(pair.b.Modify(attr, ibv::kQpState), 0);
  ibv::Wc wc = pair.b.Wait();
  ExpectEqual(wc.status, ibv::kWcWrFlushErr);
  ExpectEqual(wc.wr_id, uint64_t{8});
  ExpectEqual(pair.b.Receive(9), 0);
  ExpectEqual(pair.b.Wait().wr_id, uint64_t{9});
  ExpectEqual(pair.b.Write(pair.a.info(), 0, 8, -1, 10, 0), 0);  // not signaled, and yet
  wc = pair.b.Wait();
  ExpectEqual(wc.status, ibv::kWcWrFlushErr);
  ExpectEqual(wc.wr_id, uint64_t{10});
  // The peer only sees that nobody answers.
  ExpectEqual(pair.a.Write(pair.b.info(), 0, 8, -1, 1), 0);
  ExpectEqual(pair.a.Write(pair.b.info(), 0, 8, -1, 2), 0);
  ExpectEqual(pair.a.Wait().status, ibv::kWcRetryExcErr);
  ExpectEqual(pair.a.Wait().status, ibv::kWcWrFlushErr);
}

TEST(ResetForgetsEverything) {
  Pair pair;
  ExpectEqual(pair.a.Write(pair.b.info(), 0, 8), 0);
  usleep(20000);
  ibv::QpAttr attr;
  attr.qp_state = ibv::kQpStateReset;
  for (Endpoint* const end : {&pair.a, &pair.b}) ExpectEqual(end->Modify(attr, ibv::kQpState), 0);
  EXPECT(!pair.a.HasCompletion());
  pair.a.Connect(pair.b.info());
  pair.b.Connect(pair.a.info());
  ExpectEqual(pair.a.Write(pair.b.info(), 0, 8), 0);
  ExpectEqual(pair.a.Wait().status, ibv::kWcSuccess);
}

TEST(SenderMayComeBeforeThePeer) {
  Endpoint a;
  Endpoint b;
  a.Connect(b.info());
  Softverbs::Get().Command("retry 300000");
  ExpectEqual(a.Write(b.info(), 0, 8), 0);
  usleep(3000);
  b.ToInit();
  b.ToReadyToReceive(a.info());
  ExpectEqual(a.Wait().status, ibv::kWcSuccess);
  Softverbs::Get().Command("retry 5000");
  ExpectEqual(b.WaitEvent(), ibv::kEventCommEst);
}

// On hardware these are the mistakes that end in a timeout.
TEST(WrongAddressesAreLost) {
  const auto fails = [](auto change) {
    Endpoint a;
    Endpoint b;
    EndpointInfo peer = b.info();
    change(peer);
    a.Connect(peer);
    b.Connect(a.info());
    ExpectEqual(a.Write(b.info(), 0, 8), 0);
    return a.Wait().status == ibv::kWcRetryExcErr;
  };
  EXPECT(fails([](EndpointInfo& peer) { peer.gid.raw[15] = 99; }));
  EXPECT(fails([](EndpointInfo& peer) { peer.qpn ^= 1; }));
  EXPECT(fails([](EndpointInfo& peer) { peer.qpn ^= 1 << 20; }));  // another process
}

TEST(RequestsOfAQpCompleteInOrder) {
  Pair pair({.depth = 64});
  for (uint64_t i = 0; i < 50; ++i) {
    ExpectEqual(pair.a.Write(pair.b.info(), 0, (i % 3) * 70000, -1, i), 0);
  }
  for (uint64_t i = 0; i < 50; ++i) ExpectEqual(pair.a.Wait().wr_id, i);
}

TEST(NothingIsLeft) { ExpectEqual(std::string_view(Softverbs::Get().Objects()), kNothing); }

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

TEST(ProcessesReachEachOther) {
  std::array<int, 2> sockets{};
  ExpectEqual(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets.data()), 0);
  Softverbs::Get();            // both are of one fabric
  const pid_t child = fork();  // no device is open: there is no thread
  if (child == 0) _exit(RunChild(sockets[1]));
  {
    Endpoint end;
    Fill(end.bytes(), 2);
    EndpointInfo own = end.info();
    EndpointInfo peer{};
    ExpectEqual(read(sockets[0], &peer, sizeof peer), ssize_t{sizeof peer});
    end.Connect(peer);
    ExpectEqual(end.Receive(), 0);
    ExpectEqual(write(sockets[0], &own, sizeof own), ssize_t{sizeof own});
    ExpectEqual(end.Wait().imm_data, 9U);
    std::vector<std::byte> expected(end.bytes().size());
    Fill(expected, 1);
    EXPECT(std::memcmp(end.bytes().data(), expected.data(), 500000) == 0);
    char is_done = 0;
    ExpectEqual(read(sockets[0], &is_done, 1), ssize_t{1});
    Softverbs::Get().Command("all port soft0 1 down");
    int status = 0;
    waitpid(child, &status, 0);
    ExpectEqual(WEXITSTATUS(status), 0);
    Softverbs::Get().Command("port soft0 1 up");
    // The other process has ended.
    ExpectEqual(end.Write(peer, 0, 8), 0);
    ExpectEqual(end.Wait().status, ibv::kWcRetryExcErr);
  }
  for (const int socket : sockets) close(socket);
}

}  // namespace
}  // namespace jaxhet::testing
