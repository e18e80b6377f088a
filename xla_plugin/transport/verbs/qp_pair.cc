#include "xla_plugin/transport/verbs/qp_pair.h"

#include <algorithm>
#include <random>
#include <utility>

namespace jaxhet::verbs {
namespace {

// A credit in so many is signalled, or the send queue would never be known to have room again.
constexpr uint32_t kSignalEvery = 8;

uint32_t RandomPsn() { return std::random_device()() & 0xff'ffff; }

}  // namespace

uint64_t Pack(const WorkId& id) { return uint64_t{id.is_receive} << 63 | id.qp; }

WorkId UnpackWorkId(uint64_t packed) { return {static_cast<uint32_t>(packed), packed >> 63 != 0}; }

NicPairInfo InfoOf(const NicInfo& nic, uint32_t rkey) {
  NicPairInfo info{};
  nic.name.copy(info.nic.data(), info.nic.size() - 1);
  info.gid = nic.gid.gid.raw;
  info.rkey = rkey;
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

QpPair::QpPair(Nic& nic, const CompletionQueue& cq, QueuePairSizes sizes, uint16_t pkey_index)
    : nic_name_(nic.info.name),
      num_receives_(sizes.receives),
      psn_(RandomPsn()),
      qp_(std::make_unique<QueuePair>(nic.domain, cq, sizes, nic.info.port, pkey_index)),
      room_(sizes.sends) {}

void QpPair::Connect(uint32_t index, Route route, QpInfo peer) {
  index_ = index;
  for (uint32_t i = 0; i < num_receives_; ++i) {
    if (const int error = Restock()) ThrowCall("ibv_post_recv", nic_name_, error);
  }
  route.qp_num = peer.qp_num;
  route.psn = peer.psn;
  qp_->Connect(route, psn_);
}

int QpPair::Restock() { return qp_->PostReceive(Pack({.qp = index_, .is_receive = true})); }

int QpPair::Post(const Write& write, std::optional<Immediate> immediate, bool is_signalled) {
  ibv::Sge sge{.addr = write.from, .length = write.num_bytes, .lkey = write.lkey};
  ibv::SendWr wr;
  wr.wr_id = Pack({.qp = index_, .is_receive = false});
  wr.sg_list = &sge;
  wr.num_sge = write.num_bytes > 0 ? 1 : 0;
  wr.opcode = immediate ? ibv::kWrRdmaWriteWithImm : ibv::kWrRdmaWrite;
  wr.imm_data = immediate ? Pack(*immediate) : 0;
  wr.send_flags = is_signalled ? ibv::kSendSignaled : 0;
  wr.remote_addr = write.to;
  wr.rkey = write.rkey;
  if (const int error = qp_->PostSend(wr)) return error;
  --room_;
  bytes_in_flight_ += write.num_bytes;
  ++unsignalled_.num_sends;
  unsignalled_.num_bytes += write.num_bytes;
  return 0;
}

int QpPair::PostFragment(const Write& write) { return Post(write, std::nullopt, false); }

int QpPair::PostLast(const Write& write, Immediate immediate, int slot) {
  const bool is_signalled = slot != kNoSlot || unsignalled_.num_sends + 1 >= kSignalEvery;
  if (const int error = Post(write, immediate, is_signalled)) return error;
  if (!is_signalled) return 0;
  unsignalled_.slot = slot;
  posted_.push_back(std::exchange(unsignalled_, {}));
  return 0;
}

int QpPair::OnSent() {
  if (posted_.empty()) return kNoSlot;
  const Posted oldest = posted_.front();
  posted_.pop_front();
  room_ += oldest.num_sends;
  bytes_in_flight_ -= oldest.num_bytes;
  return oldest.slot;
}

void QpPair::Kill() {
  if (qp_) qp_->Kill();
  state_ = State::kDead;
}

void QpPair::Close() {
  qp_->Kill();
  state_ = State::kClosing;
}

void QpPair::Finish() {
  qp_.reset();
  posted_.clear();
  state_ = State::kDead;
}

}  // namespace jaxhet::verbs
