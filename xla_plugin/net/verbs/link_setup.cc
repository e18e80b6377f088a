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
