#include "xla_plugin/net/verbs/qp.h"

#include <arpa/inet.h>

#include <algorithm>
#include <random>

namespace jaxhet::verbs {
namespace {

uint32_t RandomPsn() { return std::random_device()() & 0xff'ffff; }

}  // namespace

uint64_t Pack(const WorkId& id) { return uint64_t{id.is_receive} << 32 | Pack(id.sent); }

WorkId UnpackWorkId(uint64_t packed) {
  return {packed >> 32 != 0, UnpackImmediate(static_cast<uint32_t>(packed))};
}

NicPairInfo InfoOf(const NicInfo& nic) {
  NicPairInfo info{};
  nic.name.copy(info.nic.data(), info.nic.size() - 1);
  info.gid = nic.gid.gid.raw;
  info.mtu = static_cast<uint32_t>(nic.mtu);
  info.lid = nic.lid;
  info.is_infiniband = nic.is_infiniband ? 1 : 0;
  return info;
}

Route RouteOf(const NicInfo& own, const NicPairInfo& peer, const Options& options) {
  Route route{.gid = {.raw = peer.gid},
              .lid = peer.lid,
              .is_global = !own.is_infiniband,
              .gid_index = static_cast<uint8_t>(own.gid.index),
              .mtu = std::min(own.mtu, static_cast<int>(peer.mtu)),
              .traffic_class = static_cast<uint8_t>(options.traffic_class),
              .service_level = static_cast<uint8_t>(options.service_level),
              .timeout = static_cast<uint8_t>(options.timeout),
              .retries = static_cast<uint8_t>(options.retries)};
  return route;
}

Qp::Qp(Nic& nic, const CompletionQueue& cq, ImmediateKind kind, uint32_t num_sends,
       uint32_t num_receives, uint16_t pkey_index)
    : nic_name_(nic.info.name),
      kind_(kind),
      num_receives_(num_receives),
      psn_(RandomPsn()),
      qp_(nic.domain, cq, {.sends = kSendsPerChunk * num_sends, .receives = num_receives},
          nic.info.port, pkey_index),
      room_(num_sends) {}

void Qp::Connect(Route route, QpInfo peer) {
  for (uint32_t i = 0; i < num_receives_; ++i) {
    if (const int error = PostReceive()) ThrowCall("ibv_post_recv", nic_name_, error);
  }
  route.qp_num = peer.qp_num;
  route.psn = peer.psn;
  qp_.Connect(route, psn_);
}

int Qp::PostReceive() {
  return qp_.PostReceive(Pack(WorkId{.is_receive = true, .sent = {kind_, 0}}));
}

int Qp::PostSend(const Write& write, ibv::SendWr wr) {
  ibv::Sge sge{.addr = write.from, .length = write.num_bytes, .lkey = write.lkey};
  wr.sg_list = &sge;
  wr.num_sge = write.num_bytes > 0 ? 1 : 0;
  wr.remote_addr = write.to;
  wr.rkey = write.rkey;
  return qp_.PostSend(wr);
}

int Qp::PostHeader(const Write& write) {
  ibv::SendWr wr;
  wr.opcode = ibv::kWrRdmaWrite;
  return PostSend(write, wr);
}

int Qp::Post(const Write& write, uint8_t slot) {
  const Immediate immediate{kind_, slot};
  ibv::SendWr wr;
  wr.wr_id = Pack(WorkId{.is_receive = false, .sent = immediate});
  wr.opcode = ibv::kWrRdmaWriteWithImm;
  wr.imm_data = htonl(Pack(immediate));
  wr.send_flags = ibv::kSendSignaled;
  --room_;
  return PostSend(write, wr);
}

}  // namespace jaxhet::verbs
