// Behaviour of the software libibverbs that equals that of hardware.

#include "tests/softverbs/softverbs.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <span>
#include <string>
#include <vector>

#include "tests/cpp/testing.h"
#include "tests/softverbs/endpoint.h"

namespace jaxhet::testing {
namespace {

constexpr std::string_view kLater = "delay us=1000000000";  // until it is released
constexpr std::string_view kNothing = "contexts 0 pds 0 mrs 0 cqs 0 channels 0 qps 0";

void Fill(std::vector<std::byte>& bytes, size_t seed) {
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = std::byte((i * 31 + (i >> 8) + seed) & 255);
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
  EXPECT_EQ(Verbs().reg_mr_iova2(end.pd(), end.bytes().data(), 8, 0, ibv::kAccessRemoteWrite),
            nullptr);
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

TEST(SoftverbsTest, NothingIsLeft) {
  EXPECT_EQ(std::string_view(Softverbs::Get().Objects()), kNothing);
}

}  // namespace
}  // namespace jaxhet::testing
