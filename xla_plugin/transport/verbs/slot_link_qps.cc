#include <algorithm>
#include <array>
#include <utility>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"
#include "xla_plugin/base/take.h"
#include "xla_plugin/transport/verbs/slot_link.h"

// How a link is set up, and what it does when a queue pair fails.
namespace jaxhet::verbs {
namespace {

template <typename T>
void Append(std::string& text, const T& info) {
  text.append(reinterpret_cast<const char*>(&info), sizeof info);
}

QueuePairSizes SizesOf(const Options& options, uint32_t sends_per_slot, size_t num_slots) {
  // Sends: with the credit for a slot that arrived. Receives: a chunk in each slot, a credit, and
  // what has not been put back.
  return {.sends = 2 * (sends_per_slot + 1) * static_cast<uint32_t>(options.depth),
          .receives = static_cast<uint32_t>(2 * num_slots + SlotLink::kReceiveBatch)};
}

// Entries of a NIC pair's completion queue. A queue pair that fails leaves completions of all that
// was posted.
int NumEntries(const NicInfo& nic, const Options& options, QueuePairSizes sizes, size_t num_qps) {
  const size_t num_entries = num_qps * (sizes.sends + sizes.receives);
  if (std::cmp_less_equal(num_entries, nic.max_cqe)) return static_cast<int>(num_entries);
  Throw(ErrorCode::kTransport, "a completion queue of ", nic.name, " has at most ", nic.max_cqe,
        " entries, and JAXHET_VERBS_QPS=", options.qps, " with JAXHET__VERBS_DEPTH=", options.depth,
        " needs ", num_entries, "; set one of them to less");
}

constexpr const char* kOffer = "the peer's offer";

// The head of an offer; the rest is left in it.
OfferInfo TakeOffer(std::string_view& offer) {
  const auto info = Take<OfferInfo>(offer, kOffer);
  if (info.magic != kOfferMagic || info.num_nic_pairs == 0 || info.num_qps < 2 ||
      info.num_slots == 0 || info.chunk_bytes == 0) {
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
  if (!HasRoute(own.gid.netdev, gid)) {
    Throw(ErrorCode::kTransport, name, ": no route through ", own.gid.netdev,
          "; set JAXHET_VERBS_GID_INDEX or JAXHET_VERBS_DEVICES to what is in the peer's network");
  }
}

}  // namespace

SlotLink::SlotLink(NicMemory::NicList nics, Options options, const Slots& slots, PeerHost& host)
    : options_(std::move(options)),
      host_(host),
      outgoing_(slots.outgoing),
      incoming_(slots.incoming),
      chunk_bytes_(slots.chunk_bytes),
      sends_per_slot_(kMostParts + (slots.headers == Headers::kNone ? 0 : 1)),
      slots_(slots.count) {
  if (slots.headers == Headers::kOfEachSlot) {
    headers_ = std::make_unique<Staging>(nics, slots.count, kHeaderBytes, ibv::kAccessLocalWrite);
    arrived_headers_ = std::make_unique<Staging>(nics, slots.count, kHeaderBytes,
                                                 ibv::kAccessLocalWrite | ibv::kAccessRemoteWrite);
  }
  const QueuePairSizes sizes = SizesOf(options_, sends_per_slot_, slots_.size());
  const auto num_qps = static_cast<size_t>(options_.qps) + 1;
  for (const auto& nic : nics) {
    NicPair& pair = nic_pairs_.emplace_back(nic, nic_pairs_.size(),
                                            NumEntries(nic->info, options_, sizes, num_qps));
    for (size_t i = 0; i < num_qps; ++i) {
      pair.qps.emplace_back(*nic, pair.cq, sizes, static_cast<uint16_t>(options_.pkey_index));
    }
  }
}

SlotLink::~SlotLink() = default;

std::string SlotLink::Offer() const {
  std::string offer;
  Append(offer, OfferInfo{.magic = kOfferMagic,
                          .num_nic_pairs = static_cast<uint32_t>(nic_pairs_.size()),
                          .num_qps = static_cast<uint32_t>(nic_pairs_.front().qps.size()),
                          .num_slots = static_cast<uint32_t>(slots_.size()),
                          .slot_bytes = incoming_.slot_bytes,
                          .chunk_bytes = chunk_bytes_,
                          .slots = incoming_.address(0)});
  for (const NicPair& pair : nic_pairs_) {
    Append(offer, InfoOf(pair.nic->info, incoming_.region(pair.index).rkey()));
    for (const QpPair& qp : pair.qps) Append(offer, qp.info());
  }
  if (!arrived_headers_) return offer;
  Append(offer, arrived_headers_->slots().address(0));
  for (const NicPair& pair : nic_pairs_)
    Append(offer, arrived_headers_->slots().region(pair.index).rkey());
  return offer;
}

void SlotLink::Accept(std::string_view offer) {
  const OfferInfo info = TakeOffer(offer);
  while (nic_pairs_.size() > info.num_nic_pairs) nic_pairs_.pop_back();
  slots_.resize(std::min<size_t>(slots_.size(), info.num_slots));
  peer_slots_.resize(slots_.size());
  for (size_t slot = slots_.size(); slot > 0; --slot) free_.push_back(slot - 1);
  chunk_bytes_ = std::min<size_t>(chunk_bytes_, info.chunk_bytes);
  peer_slot_bytes_ = info.slot_bytes;
  peer_slots_address_ = info.slots;
  for (size_t i = 0; i < info.num_nic_pairs; ++i) {
    const auto pair = Take<NicPairInfo>(offer, kOffer);
    std::vector<QpInfo> qps;
    for (size_t j = 0; j < info.num_qps; ++j) qps.push_back(Take<QpInfo>(offer, kOffer));
    if (i < nic_pairs_.size()) SetUpNicPair(nic_pairs_[i], pair, qps);
  }
  if (!headers_) return;
  peer_headers_address_ = Take<uint64_t>(offer, kOffer);
  for (NicPair& pair : nic_pairs_) pair.peer_headers_rkey = Take<uint32_t>(offer, kOffer);
}

void SlotLink::SetUpNicPair(NicPair& pair, NicPairInfo peer, std::span<const QpInfo> qps) {
  peer.nic.back() = '\0';
  const NicInfo& own = pair.nic->info;
  pair.name = StrCat(NameOf(own.name, own.gid.gid, own.lid, own.is_infiniband), " to ",
                     NameOf(peer.nic.data(), {.raw = peer.gid}, peer.lid, peer.is_infiniband != 0));
  CheckReachable(own, peer, pair.name);
  pair.peer_rkey = peer.rkey;
  const Route route = RouteOf(own, peer, options_);
  const size_t num_qps = std::min(pair.qps.size(), qps.size());
  while (pair.qps.size() > num_qps) pair.qps.pop_back();
  for (size_t i = 0; i < num_qps; ++i) {
    pair.qps[i].Connect(static_cast<uint32_t>(pair.index * num_qps + i), route, qps[i]);
    pair.qps[i].SetLive();
  }
}

SlotLink::Choice SlotLink::QpOf(uint32_t index) {
  const size_t num_qps = nic_pairs_.front().qps.size();
  if (index >= nic_pairs_.size() * num_qps)
    Throw(ErrorCode::kTransport, "there is no queue pair ", index);
  NicPair& pair = nic_pairs_[index / num_qps];
  return {&pair, &pair.qps[index % num_qps]};
}

size_t SlotLink::NumLiveQps() const {
  size_t count = 0;
  for (const NicPair& pair : nic_pairs_) {
    count += static_cast<size_t>(std::ranges::count_if(pair.qps, &QpPair::is_live));
  }
  return count;
}

// A port that is down may come back before its queue pairs give up, so that its queue pairs are
// closed only where there are others.
void SlotLink::LookAtNics() {
  for (NicPair& pair : nic_pairs_) {
    const uint64_t num_events = pair.nic->context->num_events();
    if (std::exchange(pair.seen_events, num_events) == num_events) continue;
    const std::string problem = pair.nic->problem();
    if (problem == pair.seen_problem) continue;
    pair.seen_problem = problem;
    const bool has_others = std::ranges::any_of(nic_pairs_, [](const NicPair& other) {
      return other.nic->problem().empty() && std::ranges::any_of(other.qps, &QpPair::is_live);
    });
    if (problem.empty() || !has_others) continue;
    for (QpPair& qp : pair.qps) CloseQp(pair, qp, problem);
  }
}

void SlotLink::CloseQp(NicPair& pair, QpPair& qp, std::string_view reason) {
  if (!qp.is_live()) return;
  qp.Close();
  Forget(qp);
  const std::string nic_problem = pair.nic->problem();
  last_failure_ = StrCat(pair.name, ": ", reason);
  if (!nic_problem.empty() && nic_problem != reason)
    last_failure_ += StrCat(" (", nic_problem, ")");
  if (!qp.peer_has_closed) {
    host_.Log(StrCat("queue pair ", qp.index(), ", ", last_failure_, ": its chunks move to ",
                     NumLiveQps(), " other queue pairs"));
  }
  const QpClosedInfo info{qp.index()};
  host_.Send(std::array{ObjectIovec(info),
                        ToIovec(peer_slots_.data(), peer_slots_.size() * sizeof(SlotSequences)),
                        ToIovec(reason.data(), reason.size())});
  if (qp.peer_has_closed) OnBothClosed(qp);
}

// Chunks that arrived over the queue pair and were not taken yet count as lost: they are sent
// again.
void SlotLink::Forget(const QpPair& qp) {
  std::erase_if(receives_due_, [&](const Choice& due) { return due.qp == &qp; });
  std::erase_if(arrivals_, [&](const Arrival& arrival) {
    if (arrival.qp != qp.index()) return false;
    peer_slots_[arrival.slot].tail = peer_slots_[arrival.slot].head;
    return true;
  });
}

void SlotLink::Refuse(const Arrival& arrival, std::string_view reason) {
  peer_slots_[arrival.slot].tail = peer_slots_[arrival.slot].head;
  NicPair& pair = nic_pairs_[NicOf(arrival)];
  for (QpPair& qp : pair.qps) CloseQp(pair, qp, reason);
}

void SlotLink::OnMessage(std::span<const std::byte> message) {
  std::string_view rest(reinterpret_cast<const char*>(message.data()), message.size());
  const auto info = Take<QpClosedInfo>(rest, "a queue pair's message");
  const auto [pair, qp] = QpOf(info.qp);
  if (std::exchange(qp->peer_has_closed, true)) {
    Throw(ErrorCode::kTransport, "queue pair ", info.qp, " was closed twice");
  }
  for (size_t index = 0; index < slots_.size(); ++index) {
    const auto sequences = Take<SlotSequences>(rest, "a queue pair's message");
    OnCredit(index, sequences.head);
    Slot& slot = slots_[index];
    if (slot.via.qp == qp) slot.has_arrived = slot.sequence == sequences.tail;
  }
  if (qp->is_closed()) return OnBothClosed(*qp);
  CloseQp(*pair, *qp, StrCat("the peer: ", rest));
}

void SlotLink::Kill() {
  for (NicPair& pair : nic_pairs_) {
    for (QpPair& qp : pair.qps) qp.Kill();
  }
}

// Nothing can reach the peer's slots over the queue pair any more, and what it had and did not
// bring is sent again.
void SlotLink::OnBothClosed(QpPair& qp) {
  qp.Finish();
  for (size_t index = 0; index < slots_.size(); ++index) {
    Slot& slot = slots_[index];
    if (slot.via.qp != &qp) continue;
    slot.via = {};
    slot.is_posted = false;
    if (!slot.is_emptied && !slot.has_arrived) resends_.push_back(index);
    FreeIfDone(index);
  }
  const auto is_dead = [](const QpPair& other) { return other.state() == QpPair::State::kDead; };
  const bool all_dead = std::ranges::all_of(
      nic_pairs_, [&](const NicPair& other) { return std::ranges::all_of(other.qps, is_dead); });
  if (all_dead) {
    host_.Lost(StrCat("no queue pair is left; the last was ", last_failure_,
                      ". Check link and "
                      "switch, that the GIDs of both ends are in one network "
                      "(JAXHET_VERBS_GID_INDEX), and for RoCE the flow control of its traffic "
                      "class (JAXHET_VERBS_TRAFFIC_CLASS)"));
  }
}

}  // namespace jaxhet::verbs
