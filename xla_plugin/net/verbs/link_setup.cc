#include <algorithm>
#include <utility>

#include "xla_plugin/base/error.h"
#include "xla_plugin/base/take.h"
#include "xla_plugin/net/verbs/link.h"

// How a link is set up.
namespace jaxhet::verbs {
namespace {

template <typename T>
void Append(std::string& text, const T& info) {
  text.append(reinterpret_cast<const char*>(&info), sizeof info);
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
}

}  // namespace

Link::Link(NicList nics, Options options, const Slots& slots, ConnectionHost& host)
    : options_(std::move(options)),
      host_(host),
      outgoing_(slots.outgoing),
      incoming_(slots.incoming),
      chunk_bytes_(slots.chunk_bytes),
      headers_(nics, slots.count, kHeaderBytes, ibv::kAccessLocalWrite),
      arrived_headers_(nics, slots.count, kHeaderBytes, kPeerWrites),
      slots_(slots.count) {
  // Receives: a chunk in each slot, and a credit for each. Sends: as many, twice over.
  const QueuePairSizes sizes{
      .sends = 2 * Qp::kSendsPerChunk * static_cast<uint32_t>(options_.depth),
      .receives = 2 * static_cast<uint32_t>(slots_.size())};
  const auto num_qps = static_cast<uint32_t>(options_.qps) + 1;
  // A queue pair that fails leaves completions of all that was posted.
  const auto num_entries = static_cast<int>(num_qps * (sizes.sends + sizes.receives));
  for (const auto& nic : nics) {
    NicPair& pair = nic_pairs_.emplace_back(nic, nic_pairs_.size(), num_entries);
    for (uint32_t i = 0; i < num_qps; ++i) {
      pair.qps.emplace_back(*nic, pair.cq, sizes, static_cast<uint16_t>(options_.pkey_index));
    }
  }
}

Link::~Link() = default;

std::string Link::Offer() const {
  std::string offer;
  Append(offer, OfferInfo{.magic = kOfferMagic,
                          .num_nic_pairs = static_cast<uint32_t>(nic_pairs_.size()),
                          .num_qps = static_cast<uint32_t>(nic_pairs_.front().qps.size()),
                          .num_slots = static_cast<uint32_t>(slots_.size()),
                          .slot_bytes = incoming_.slot_bytes,
                          .chunk_bytes = chunk_bytes_,
                          .slots = incoming_.address(0),
                          .headers = arrived_headers_.slots().address(0)});
  for (const NicPair& pair : nic_pairs_) {
    Append(offer, InfoOf(pair.nic->info, incoming_.rkey(pair.index),
                         arrived_headers_.slots().rkey(pair.index)));
    for (const Qp& qp : pair.qps) Append(offer, qp.info());
  }
  return offer;
}

void Link::Accept(std::string_view offer) {
  const OfferInfo info = TakeOffer(offer);
  while (nic_pairs_.size() > info.num_nic_pairs) nic_pairs_.pop_back();
  slots_.resize(std::min<size_t>(slots_.size(), info.num_slots));
  peer_slots_.resize(slots_.size());
  chunk_bytes_ = std::min<size_t>(chunk_bytes_, info.chunk_bytes);
  peer_slot_bytes_ = info.slot_bytes;
  peer_slots_address_ = info.slots;
  peer_headers_address_ = info.headers;
  for (size_t i = 0; i < info.num_nic_pairs; ++i) {
    const auto pair = Take<NicPairInfo>(offer, kOffer);
    std::vector<QpInfo> qps;
    for (size_t j = 0; j < info.num_qps; ++j) qps.push_back(Take<QpInfo>(offer, kOffer));
    if (i < nic_pairs_.size()) SetUpNicPair(nic_pairs_[i], pair, qps);
  }
}

void Link::SetUpNicPair(NicPair& pair, NicPairInfo peer, std::span<const QpInfo> qps) {
  peer.nic.back() = '\0';
  const NicInfo& own = pair.nic->info;
  pair.name = StrCat(NameOf(own.name, own.gid.gid, own.lid, own.is_infiniband), " to ",
                     NameOf(peer.nic.data(), {.raw = peer.gid}, peer.lid, peer.is_infiniband != 0));
  CheckReachable(own, peer, pair.name);
  pair.peer_rkey = peer.rkey;
  pair.peer_headers_rkey = peer.headers_rkey;
  const Route route = RouteOf(own, peer, options_);
  while (pair.qps.size() > qps.size()) pair.qps.pop_back();
  for (size_t i = 0; i < pair.qps.size(); ++i) {
    pair.qps[i].Connect(static_cast<uint32_t>(i), route, qps[i]);
  }
}

}  // namespace jaxhet::verbs
