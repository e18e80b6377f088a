#include "xla_plugin/net/verbs/link.h"

#include <arpa/inet.h>

#include <algorithm>
#include <utility>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"

namespace jaxhet::verbs {
namespace {

// Completions are polled for so long after the last one, before an event is waited for.
constexpr std::chrono::microseconds kSpin{100};

template <typename T>
void Append(std::string& text, const T& info) {
  text.append(reinterpret_cast<const char*>(&info), sizeof info);
}

constexpr const char* kOffer = "the peer's offer";

// The head of an offer; the rest is left in it.
OfferInfo TakeOffer(std::string_view& offer) {
  const auto info = Take<OfferInfo>(offer, kOffer);
  if (info.magic != kOfferMagic || info.num_nic_pairs == 0 || info.num_slots == 0 ||
      info.chunk_bytes == 0) {
    Throw(ErrorCode::kTransport, "the peer's offer is not of this version of jaxhet");
  }
  return info;
}

// "mlx5_0:1 (::ffff:10.0.0.1)", "mlx5_0:1 (LID 7)".
std::string NameOf(std::string_view nic, const ibv::Gid& gid, uint16_t lid, bool is_infiniband) {
  return is_infiniband ? StrCat(nic, " (LID ", lid, ")") : StrCat(nic, " (", ToString(gid), ")");
}

// Throws if the two NICs can't reach each other, as far as can be known without trying.
void CheckReachable(const NicInfo& own, const NicPairInfo& peer, std::string_view name) {
  if (own.is_infiniband != (peer.is_infiniband != 0)) {
    Throw(ErrorCode::kTransport, name,
          ": one is InfiniBand, the other RoCE; choose NICs of one "
          "network with JAXHET_VERBS_DEVICES");
  }
  if (own.is_infiniband) return;
  const ibv::Gid gid{.raw = peer.gid};
  if (IsIpv4(own.gid.gid) != IsIpv4(gid)) {
    Throw(ErrorCode::kTransport, name,
          ": one GID is IPv4, the other IPv6; choose alike ones with "
          "JAXHET_VERBS_GID_INDEX");
  }
}

}  // namespace

std::vector<Pollable*> Link::Pollables() {
  std::vector<Pollable*> pollables;
  for (NicPair& pair : nic_pairs_) pollables.push_back(&pair.cq);
  return pollables;
}

bool Link::Arm() {
  bool armed = false;
  for (NicPair& pair : nic_pairs_) armed |= pair.cq.Arm();
  return armed;
}

void Link::Poll() {
  for (NicPair& pair : nic_pairs_) {
    std::span<const ibv::Wc> completions;
    do {
      completions = pair.cq.Poll(completions_, pair.name);
      for (const ibv::Wc& wc : completions) OnCompletion(pair, wc);
      if (!completions.empty()) busy_until_ = Clock::now() + kSpin;
    } while (completions.size() == completions_.size());
  }
}

void Link::OnCompletion(NicPair& pair, const ibv::Wc& wc) {
  if (is_lost_) return;
  if (wc.status != ibv::kWcSuccess) return Fail(pair, Describe(pair.nic->context->api(), wc));
  if (wc.wr_id == QueuePair::kReceiveId) {
    OnImmediate(pair, UnpackImmediate(ntohl(wc.imm_data)));
    if (const int error = pair.qp.PostReceive()) Fail(pair, ErrnoText("ibv_post_recv", error));
    return;
  }
  const Immediate sent = UnpackImmediate(static_cast<uint32_t>(wc.wr_id));
  const bool is_chunk = sent.kind == ImmediateKind::kChunk;
  pair.room += is_chunk ? kSendsPerChunk : 1;
  if (is_chunk) slots_.at(sent.slot).is_posted = false;
}

void Link::OnImmediate(const NicPair& pair, Immediate immediate) {
  if (immediate.slot >= slots_.size()) {
    Throw(ErrorCode::kTransport, "there is no slot ", int{immediate.slot});
  }
  if (immediate.kind == ImmediateKind::kCredit) {
    slots_[immediate.slot].is_emptied = true;
    return;
  }
  if (incoming_.memory == nullptr || is_filled_[immediate.slot]) {
    Throw(ErrorCode::kTransport, "slot ", int{immediate.slot}, " was filled twice");
  }
  is_filled_[immediate.slot] = true;
  arrivals_.push_back({immediate.slot, pair.index});
}

void Link::Send(size_t index, size_t num_bytes) {
  slots_[index] = {.is_posted = true, .is_emptied = false};
  NicPair* const pair = WithRoom(kSendsPerChunk);
  pair->room -= kSendsPerChunk;
  const Write header{.from = headers_.slots().address(index),
                     .lkey = headers_.slots().lkey(pair->index),
                     .num_bytes = kHeaderBytes,
                     .to = peer_headers_address_ + index * kHeaderBytes,
                     .rkey = pair->peer_headers_rkey};
  const Write bytes{.from = outgoing_.address(index),
                    .lkey = outgoing_.lkey(pair->index),
                    .num_bytes = static_cast<uint32_t>(num_bytes),
                    .to = peer_slots_address_ + index * peer_slot_bytes_,
                    .rkey = pair->peer_rkey};
  int error = pair->qp.PostWrite(header);
  if (error == 0) {
    error = pair->qp.PostWrite(bytes, {ImmediateKind::kChunk, static_cast<uint8_t>(index)});
  }
  if (error != 0) Fail(*pair, ErrnoText("ibv_post_send", error));
}

void Link::Empty(size_t slot) {
  is_filled_[slot] = false;
  credits_due_.push_back(static_cast<uint8_t>(slot));
  SendCredits();
}

void Link::SendCredits() {
  for (; !credits_due_.empty(); credits_due_.pop_front()) {
    NicPair* const pair = WithRoom(1);
    if (pair == nullptr) return;
    --pair->room;
    const Write nothing{.to = peer_headers_address_, .rkey = pair->peer_headers_rkey};
    const int error = pair->qp.PostWrite(nothing, {ImmediateKind::kCredit, credits_due_.front()});
    if (error != 0) return Fail(*pair, ErrnoText("ibv_post_send", error));
  }
}

Link::NicPair* Link::WithRoom(uint32_t num_sends) const {
  const auto best = std::ranges::max_element(nic_pairs_, {}, &NicPair::room);
  return best->room >= num_sends ? &*best : nullptr;
}

void Link::Fail(const NicPair& pair, std::string_view reason) {
  if (std::exchange(is_lost_, true)) return;
  Kill();
  host_.Lost(StrCat(pair.name, ": ", reason,
                    ". Check link and switch, that the GIDs of both ends are in one network "
                    "(JAXHET_VERBS_GID_INDEX), and for RoCE the flow control of its traffic "
                    "class (JAXHET_VERBS_TRAFFIC_CLASS). Report an error of access, protection or "
                    "length: jaxhet or its peer has made it"));
}

void Link::Kill() {
  for (NicPair& pair : nic_pairs_) pair.qp.Kill();
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

// Sends: `depth` chunks, and a credit for each slot. Receives: a chunk and a credit for each slot.
// A queue pair that fails leaves completions of all that was posted.
Link::NicPair::NicPair(std::shared_ptr<Nic> its_nic, size_t its_index, const Options& options,
                       uint32_t num_slots)
    : nic(std::move(its_nic)),
      index(its_index),
      cq(*nic->context, static_cast<int>(kSendsPerChunk * options.depth + int64_t{3} * num_slots)),
      qp(nic->domain, cq,
         {.sends = kSendsPerChunk * static_cast<uint32_t>(options.depth) + num_slots,
          .receives = 2 * num_slots},
         nic->info.port, static_cast<uint16_t>(options.pkey_index)),
      room(kSendsPerChunk * static_cast<uint32_t>(options.depth) + num_slots) {}

Link::Link(NicList nics, Options options, const Slots& slots, ConnectionHost& host)
    : options_(std::move(options)),
      host_(host),
      outgoing_(slots.outgoing),
      incoming_(slots.incoming),
      chunk_bytes_(slots.chunk_bytes),
      headers_(nics, slots.count, kHeaderBytes, ibv::kAccessLocalWrite),
      arrived_headers_(nics, slots.count, kHeaderBytes, kPeerWrites),
      slots_(slots.count) {
  for (size_t i = 0; i < nics.size(); ++i) {
    for (int64_t q = 0; q < options_.qps; ++q) {
      nic_pairs_.emplace_back(nics[i], i, options_, static_cast<uint32_t>(slots.count));
    }
  }
}

Link::~Link() = default;

std::string Link::Offer() const {
  std::string offer;
  Append(offer, OfferInfo{.magic = kOfferMagic,
                          .num_nic_pairs = static_cast<uint32_t>(nic_pairs_.size()),
                          .num_slots = static_cast<uint32_t>(slots_.size()),
                          .slot_bytes = incoming_.slot_bytes,
                          .chunk_bytes = chunk_bytes_,
                          .slots = incoming_.address(0),
                          .headers = arrived_headers_.slots().address(0)});
  for (const NicPair& pair : nic_pairs_) {
    NicPairInfo info = InfoOf(pair.nic->info);
    info.rkey = incoming_.rkey(pair.index);
    info.headers_rkey = arrived_headers_.slots().rkey(pair.index);
    info.qp_num = pair.qp.number();
    info.psn = pair.qp.psn();
    Append(offer, info);
  }
  return offer;
}

void Link::Accept(std::string_view offer) {
  const OfferInfo info = TakeOffer(offer);
  while (nic_pairs_.size() > info.num_nic_pairs) nic_pairs_.pop_back();
  slots_.resize(std::min<size_t>(slots_.size(), info.num_slots));
  is_filled_.resize(slots_.size());
  chunk_bytes_ = std::min<size_t>(chunk_bytes_, info.chunk_bytes);
  peer_slot_bytes_ = info.slot_bytes;
  peer_slots_address_ = info.slots;
  peer_headers_address_ = info.headers;
  for (NicPair& pair : nic_pairs_) SetUpNicPair(pair, Take<NicPairInfo>(offer, kOffer));
}

void Link::SetUpNicPair(NicPair& pair, NicPairInfo peer) {
  peer.nic.back() = '\0';
  const NicInfo& own = pair.nic->info;
  pair.name = StrCat(NameOf(own.name, own.gid.gid, own.lid, own.is_infiniband), " to ",
                     NameOf(peer.nic.data(), {.raw = peer.gid}, peer.lid, peer.is_infiniband != 0));
  CheckReachable(own, peer, pair.name);
  pair.peer_rkey = peer.rkey;
  pair.peer_headers_rkey = peer.headers_rkey;
  for (size_t i = 0; i < 2 * slots_.size(); ++i) {
    if (const int error = pair.qp.PostReceive()) ThrowCall("ibv_post_recv", own.name, error);
  }
  Route route = RouteOf(own, options_);
  route.qp_num = peer.qp_num;
  route.psn = peer.psn;
  route.gid.raw = peer.gid;
  route.lid = peer.lid;
  route.mtu = std::min(own.mtu, static_cast<int>(peer.mtu));
  pair.qp.Connect(route);
}

}  // namespace jaxhet::verbs
