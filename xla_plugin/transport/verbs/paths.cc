#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"
#include "xla_plugin/transport/verbs/connection.h"

// How a verbs connection is set up, and what it does when a path fails.
namespace jaxhet::verbs {
namespace {

constexpr size_t kMaxSlots = 256;       // Immediate::slot
constexpr uint32_t kSendsPerChunk = 5;  // fragments and the credit for one that came
constexpr size_t kPageBytes = 4096;
constexpr int kMaxCqEntries = 32768;

template <typename T>
void Append(std::string& text, const T& info) {
  text.append(reinterpret_cast<const char*>(&info), sizeof info);
}

template <typename T>
T Take(std::string_view& text, const char* what) {
  T info{};
  if (text.size() < sizeof info) Throw(ErrorCode::kTransport, what, " is cut");
  std::memcpy(&info, text.data(), sizeof info);
  text.remove_prefix(sizeof info);
  return info;
}

size_t NumSlots(Nics& nics) {
  return std::min(static_cast<size_t>(nics.options().depth) * nics.Usable().size(), kMaxSlots);
}

// What fits one work request on every NIC, with its header.
size_t ChunkBytes(std::span<const std::shared_ptr<Nic>> nics, size_t wanted) {
  for (const auto& nic : nics) {
    wanted = std::min<size_t>(wanted, nic->info.max_message - kChunkHeaderBytes);
  }
  return wanted;
}

size_t SlotBytes(size_t chunk_bytes) {
  return (kChunkHeaderBytes + chunk_bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

QueuePairSizes SizesOf(const Options& options, size_t num_slots) {
  // Receives: a chunk in each slot, and a credit for each.
  return {.sends = 2 * kSendsPerChunk * static_cast<uint32_t>(options.depth),
          .receives = 2 * static_cast<uint32_t>(num_slots)};
}

// A path that fails leaves completions of all that was posted, and is replaced meanwhile.
int NumEntries(QueuePairSizes sizes, size_t num_paths) {
  const size_t num_entries = 2 * num_paths * (sizes.sends + sizes.receives);
  return static_cast<int>(std::min<size_t>(num_entries, kMaxCqEntries));
}

RailInfo InfoOf(const NicInfo& nic, uint32_t rkey) {
  RailInfo info{};
  nic.name.copy(info.nic.data(), info.nic.size() - 1);
  info.gid = nic.gid.gid.raw;
  info.rkey = rkey;
  info.mtu = static_cast<uint32_t>(nic.mtu);
  info.lid = nic.lid;
  info.is_infiniband = nic.is_infiniband ? 1 : 0;
  return info;
}

// "mlx5_0:1 (::ffff:10.0.0.1)", "mlx5_0:1 (LID 7)".
std::string NameOf(std::string_view nic, const ibv::Gid& gid, uint16_t lid, bool is_infiniband) {
  return is_infiniband ? StrCat(nic, " (LID ", lid, ")") : StrCat(nic, " (", ToString(gid), ")");
}

Route RouteOf(const NicInfo& own, const RailInfo& peer, const Options& options) {
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

// Throws if the two NICs can't reach each other, as far as can be known without trying.
void CheckReachable(const NicInfo& own, const RailInfo& peer, std::string_view rail) {
  if (own.is_infiniband != (peer.is_infiniband != 0)) {
    Throw(ErrorCode::kTransport, rail,
          ": one is InfiniBand, the other RoCE; choose NICs of one "
          "network with JAXHET_VERBS_DEVICES");
  }
  if (own.is_infiniband) return;
  const ibv::Gid gid{.raw = peer.gid};
  if (IsIpv4(own.gid.gid) != IsIpv4(gid)) {
    Throw(ErrorCode::kTransport, rail,
          ": one GID is IPv4, the other IPv6; choose alike ones with "
          "JAXHET_VERBS_GID_INDEX");
  }
  if (!HasRoute(own.gid.netdev, gid)) {
    Throw(ErrorCode::kTransport, rail, ": no route through ", own.gid.netdev,
          "; set JAXHET_VERBS_GID_INDEX or JAXHET_VERBS_DEVICES to what is in the peer's network");
  }
}

}  // namespace

VerbsConnection::Rail::Rail(std::shared_ptr<Nic> its_nic, int num_entries,
                            const Staging& its_outgoing, const Staging& its_incoming)
    : nic(std::move(its_nic)),
      cq(*nic->context, num_entries),
      outgoing(nic->domain, its_outgoing.memory(), ibv::kAccessLocalWrite),
      incoming(nic->domain, its_incoming.memory(),
               ibv::kAccessLocalWrite | ibv::kAccessRemoteWrite) {}

VerbsConnection::VerbsConnection(Nics& nics, size_t chunk_bytes, ConnectionHost& host)
    : options_(nics.options()),
      host_(host),
      chunk_bytes_(ChunkBytes(nics.Usable(), chunk_bytes)),
      outgoing_(NumSlots(nics), SlotBytes(chunk_bytes_)),
      incoming_(NumSlots(nics), SlotBytes(chunk_bytes_)),
      slots_(NumSlots(nics)) {
  const QueuePairSizes sizes = SizesOf(options_, slots_.size());
  const auto num_paths = static_cast<size_t>(options_.qps) + 1;
  for (const auto& nic : nics.Usable()) {
    Rail& rail = rails_.emplace_back(nic, NumEntries(sizes, num_paths), outgoing_, incoming_);
    for (size_t i = 0; i < num_paths; ++i) {
      rail.paths.emplace_back(*nic, rail.cq, sizes, static_cast<uint16_t>(options_.pkey_index));
    }
  }
}

VerbsConnection::~VerbsConnection() = default;

std::string VerbsConnection::Offer() {
  std::string offer;
  Append(offer, OfferInfo{.magic = kOfferMagic,
                          .num_rails = static_cast<uint32_t>(rails_.size()),
                          .num_paths = static_cast<uint32_t>(rails_.front().paths.size()),
                          .num_slots = static_cast<uint32_t>(slots_.size()),
                          .slot_bytes = incoming_.slot_bytes(),
                          .chunk_bytes = chunk_bytes_,
                          .slots = reinterpret_cast<uint64_t>(incoming_.memory().data())});
  for (const Rail& rail : rails_) {
    Append(offer, InfoOf(rail.nic->info, rail.incoming.rkey()));
    for (const Path& path : rail.paths) Append(offer, path.info());
  }
  return offer;
}

void VerbsConnection::Accept(std::string_view offer) {
  const auto info = Take<OfferInfo>(offer, "the peer's offer");
  if (info.magic != kOfferMagic || info.num_rails == 0 || info.num_paths < 2 ||
      info.num_slots == 0 || info.chunk_bytes == 0) {
    Throw(ErrorCode::kTransport, "the peer's offer is not of this version of jaxhet");
  }
  while (rails_.size() > info.num_rails) rails_.pop_back();
  slots_.resize(std::min<size_t>(slots_.size(), info.num_slots));
  peer_slots_.resize(slots_.size());
  for (size_t slot = slots_.size(); slot > 0; --slot) free_.push_back(slot - 1);
  chunk_bytes_ = std::min<size_t>(chunk_bytes_, info.chunk_bytes);
  peer_slot_bytes_ = info.slot_bytes;
  peer_slots_address_ = info.slots;
  for (size_t i = 0; i < rails_.size(); ++i) SetUpRail(rails_[i], info, i, offer);
}

void VerbsConnection::SetUpRail(Rail& rail, const OfferInfo& offer, size_t index,
                                std::string_view& rest) {
  auto peer = Take<RailInfo>(rest, "the peer's offer");
  peer.nic.back() = '\0';
  const NicInfo& own = rail.nic->info;
  rail.name = StrCat(NameOf(own.name, own.gid.gid, own.lid, own.is_infiniband), " to ",
                     NameOf(peer.nic.data(), {.raw = peer.gid}, peer.lid, peer.is_infiniband != 0));
  CheckReachable(own, peer, rail.name);
  rail.peer_rkey = peer.rkey;
  const Route route = RouteOf(own, peer, options_);
  const size_t num_paths = std::min<size_t>(rail.paths.size(), offer.num_paths);
  while (rail.paths.size() > num_paths) rail.paths.pop_back();
  for (size_t i = 0; i < offer.num_paths; ++i) {
    const auto path = Take<PathInfo>(rest, "the peer's offer");
    if (i >= num_paths) continue;
    rail.paths[i].Connect(static_cast<uint32_t>(index * num_paths + i), route, path);
    rail.paths[i].SetLive();
  }
}

VerbsConnection::Choice VerbsConnection::PathOf(uint32_t index) {
  const size_t num_paths = rails_.front().paths.size();
  if (index >= rails_.size() * num_paths) Throw(ErrorCode::kTransport, "there is no path ", index);
  Rail& rail = rails_[index / num_paths];
  return {&rail, &rail.paths[index % num_paths]};
}

size_t VerbsConnection::NumLivePaths() const {
  size_t count = 0;
  for (const Rail& rail : rails_) {
    count += static_cast<size_t>(std::ranges::count_if(rail.paths, &Path::is_live));
  }
  return count;
}

// A port that is down may come back before its queue pairs give up, so that its paths are closed
// only where there are others.
void VerbsConnection::LookAtNics() {
  for (Rail& rail : rails_) {
    const std::string problem = rail.nic->problem();
    if (problem == rail.seen_problem) continue;
    rail.seen_problem = problem;
    const bool has_others = std::ranges::any_of(rails_, [](const Rail& other) {
      return other.nic->problem().empty() && std::ranges::any_of(other.paths, &Path::is_live);
    });
    if (problem.empty() || !has_others) continue;
    for (Path& path : rail.paths) ClosePath(rail, path, problem);
  }
}

void VerbsConnection::SendEvent(PathEvent event, const Path& path, PathInfo replacement,
                                std::string_view rest) {
  const PathEventInfo info{event, path.index(), path.epoch(), replacement};
  std::vector<uint16_t> emptied;
  if (event == PathEvent::kClosed) {
    for (const PeerSlot& slot : peer_slots_) emptied.push_back(slot.emptied);
  }
  host_.Send(std::array{ObjectIovec(info), ToIovec(emptied.data(), emptied.size() * 2),
                        ToIovec(rest.data(), rest.size())});
}

void VerbsConnection::ClosePath(Rail& rail, Path& path, std::string_view reason) {
  if (!path.is_live() && path.state() != Path::State::kOpening) return;
  const PathInfo replacement = path.Close();
  const std::string nic_problem = rail.nic->problem();
  last_failure_ = StrCat(rail.name, ": ", reason);
  if (!nic_problem.empty() && nic_problem != reason)
    last_failure_ += StrCat(" (", nic_problem, ")");
  if (!path.peer_closed) {
    host_.Log(StrCat("RDMA path ", path.index(), ", ", last_failure_, ": its chunks move to ",
                     NumLivePaths(), " other paths",
                     replacement.qp_num != 0 ? " or a new queue pair" : ""));
  }
  SendEvent(PathEvent::kClosed, path, replacement, reason);
  if (path.peer_closed) Reopen(rail, path);
}

void VerbsConnection::OnMessage(std::span<const std::byte> message) {
  std::string_view rest(reinterpret_cast<const char*>(message.data()), message.size());
  const auto info = Take<PathEventInfo>(rest, "a path's message");
  const auto [rail, path] = PathOf(info.path);
  if (info.event == PathEvent::kClosed) return OnPeerClosed(*rail, *path, info, rest);
  if (info.epoch != path->epoch() || path->state() != Path::State::kOpening) return;
  path->SetLive();
}

void VerbsConnection::OnPeerClosed(Rail& rail, Path& path, const PathEventInfo& info,
                                   std::string_view rest) {
  if (info.epoch != path.epoch() || path.state() == Path::State::kDead) {
    Throw(ErrorCode::kTransport, "path ", info.path, " was closed twice");
  }
  for (size_t slot = 0; slot < slots_.size(); ++slot) {
    OnCredit(slot, Take<uint16_t>(rest, "a path's message"));
  }
  path.peer_closed = info.replacement;
  if (path.state() == Path::State::kClosing) return Reopen(rail, path);
  ClosePath(rail, path, StrCat("the peer: ", rest));
}

// Both ends have closed the path: nothing can reach the peer's slots over it any more, and what it
// had is sent again.
void VerbsConnection::Reopen(Rail& rail, Path& path) {
  try {
    if (path.Reopen()) SendEvent(PathEvent::kOpened, path, {}, {});
  } catch (const Error& error) {
    ClosePath(rail, path, error.text());
  }
  for (size_t index = 0; index < slots_.size(); ++index) {
    Slot& slot = slots_[index];
    if (slot.path != &path) continue;
    slot.path = nullptr;
    slot.is_posted = false;
    if (!slot.is_emptied) resends_.push_back(index);
    FreeIfDone(index);
  }
  const auto is_dead = [](const Path& other) { return other.state() == Path::State::kDead; };
  const bool all_dead = std::ranges::all_of(
      rails_, [&](const Rail& other) { return std::ranges::all_of(other.paths, is_dead); });
  if (all_dead) {
    host_.Lost(StrCat("no RDMA path is left; the last was ", last_failure_,
                      ". Check link and "
                      "switch, that the GIDs of both ends are in one network "
                      "(JAXHET_VERBS_GID_INDEX), and for RoCE the flow control of its traffic "
                      "class (JAXHET_VERBS_TRAFFIC_CLASS)"));
  }
}

}  // namespace jaxhet::verbs
