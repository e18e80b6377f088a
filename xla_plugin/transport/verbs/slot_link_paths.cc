#include <algorithm>
#include <array>
#include <utility>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"
#include "xla_plugin/base/take.h"
#include "xla_plugin/transport/verbs/slot_link.h"

// How a link is set up, and what it does when a path fails.
namespace jaxhet::verbs {
namespace {

constexpr int kMaxCqEntries = 32768;

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

// A path that fails leaves completions of all that was posted, and is replaced meanwhile.
int NumEntries(QueuePairSizes sizes, size_t num_paths) {
  const size_t num_entries = 2 * num_paths * (sizes.sends + sizes.receives);
  return static_cast<int>(std::min<size_t>(num_entries, kMaxCqEntries));
}

// "mlx5_0:1 (::ffff:10.0.0.1)", "mlx5_0:1 (LID 7)".
std::string NameOf(std::string_view nic, const ibv::Gid& gid, uint16_t lid, bool is_infiniband) {
  return is_infiniband ? StrCat(nic, " (LID ", lid, ")") : StrCat(nic, " (", ToString(gid), ")");
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

SlotLink::SlotLink(NicMemory::NicList nics, Options options, const Slots& slots, PeerHost& host)
    : options_(std::move(options)),
      host_(host),
      outgoing_(slots.outgoing),
      incoming_(slots.incoming),
      chunk_bytes_(slots.chunk_bytes),
      sends_per_slot_(kMostParts + (slots.notes == Notes::kNone ? 0 : 1)),
      slots_(slots.count) {
  if (slots.notes == Notes::kOfEachSlot) {
    notes_ = std::make_unique<Staging>(nics, slots.count, kNoteBytes, ibv::kAccessLocalWrite);
    arrived_notes_ = std::make_unique<Staging>(nics, slots.count, kNoteBytes,
                                               ibv::kAccessLocalWrite | ibv::kAccessRemoteWrite);
  }
  const QueuePairSizes sizes = SizesOf(options_, sends_per_slot_, slots_.size());
  const auto num_paths = static_cast<size_t>(options_.qps) + 1;
  for (const auto& nic : nics) {
    Rail& rail = rails_.emplace_back(nic, rails_.size(), NumEntries(sizes, num_paths));
    for (size_t i = 0; i < num_paths; ++i) {
      rail.paths.emplace_back(*nic, rail.cq, sizes, static_cast<uint16_t>(options_.pkey_index));
    }
  }
}

SlotLink::~SlotLink() = default;

std::string SlotLink::Offer() const {
  std::string offer;
  Append(offer, OfferInfo{.magic = kOfferMagic,
                          .num_rails = static_cast<uint32_t>(rails_.size()),
                          .num_paths = static_cast<uint32_t>(rails_.front().paths.size()),
                          .num_slots = static_cast<uint32_t>(slots_.size()),
                          .slot_bytes = incoming_.slot_bytes,
                          .chunk_bytes = chunk_bytes_,
                          .slots = incoming_.address(0)});
  for (const Rail& rail : rails_) {
    Append(offer, InfoOf(rail.nic->info, incoming_.region(rail.index).rkey()));
    for (const Path& path : rail.paths) Append(offer, path.info());
  }
  if (!arrived_notes_) return offer;
  Append(offer, arrived_notes_->slots().address(0));
  for (const Rail& rail : rails_) Append(offer, arrived_notes_->slots().region(rail.index).rkey());
  return offer;
}

void SlotLink::Accept(std::string_view offer) {
  constexpr const char* kWhat = "the peer's offer";
  const auto info = Take<OfferInfo>(offer, kWhat);
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
  for (size_t i = 0; i < info.num_rails; ++i) {
    const auto rail = Take<RailInfo>(offer, kWhat);
    std::vector<PathInfo> paths;
    for (size_t j = 0; j < info.num_paths; ++j) paths.push_back(Take<PathInfo>(offer, kWhat));
    if (i < rails_.size()) SetUpRail(rails_[i], rail, paths);
  }
  if (!notes_) return;
  peer_notes_address_ = Take<uint64_t>(offer, kWhat);
  for (Rail& rail : rails_) rail.peer_notes_rkey = Take<uint32_t>(offer, kWhat);
}

void SlotLink::SetUpRail(Rail& rail, RailInfo peer, std::span<const PathInfo> paths) {
  peer.nic.back() = '\0';
  const NicInfo& own = rail.nic->info;
  rail.name = StrCat(NameOf(own.name, own.gid.gid, own.lid, own.is_infiniband), " to ",
                     NameOf(peer.nic.data(), {.raw = peer.gid}, peer.lid, peer.is_infiniband != 0));
  CheckReachable(own, peer, rail.name);
  rail.peer_rkey = peer.rkey;
  const Route route = RouteOf(own, peer, options_);
  const size_t num_paths = std::min(rail.paths.size(), paths.size());
  while (rail.paths.size() > num_paths) rail.paths.pop_back();
  for (size_t i = 0; i < num_paths; ++i) {
    rail.paths[i].Connect(static_cast<uint32_t>(rail.index * num_paths + i), route, paths[i]);
    rail.paths[i].SetLive();
  }
}

SlotLink::Choice SlotLink::PathOf(uint32_t index) {
  const size_t num_paths = rails_.front().paths.size();
  if (index >= rails_.size() * num_paths) Throw(ErrorCode::kTransport, "there is no path ", index);
  Rail& rail = rails_[index / num_paths];
  return {&rail, &rail.paths[index % num_paths]};
}

size_t SlotLink::NumLivePaths() const {
  size_t count = 0;
  for (const Rail& rail : rails_) {
    count += static_cast<size_t>(std::ranges::count_if(rail.paths, &Path::is_live));
  }
  return count;
}

// A port that is down may come back before its queue pairs give up, so that its paths are closed
// only where there are others.
void SlotLink::LookAtNics() {
  for (Rail& rail : rails_) {
    const uint64_t num_events = rail.nic->context->num_events();
    if (std::exchange(rail.seen_events, num_events) == num_events) continue;
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

void SlotLink::SendEvent(PathEvent event, const Path& path, PathInfo replacement,
                         std::string_view rest) {
  const PathEventInfo info{event, path.index(), path.epoch(), replacement};
  const size_t num_slots = event == PathEvent::kClosed ? peer_slots_.size() : 0;
  host_.Send(std::array{ObjectIovec(info),
                        ToIovec(peer_slots_.data(), num_slots * sizeof(SlotSequences)),
                        ToIovec(rest.data(), rest.size())});
}

void SlotLink::ClosePath(Rail& rail, Path& path, std::string_view reason) {
  if (!path.is_live() && path.state() != Path::State::kOpening) return;
  const PathInfo replacement = path.Close();
  Forget(path);
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

// Chunks that arrived over the path and were not taken yet count as lost: they are sent again.
void SlotLink::Forget(const Path& path) {
  std::erase_if(receives_due_, [&](const Choice& due) { return due.path == &path; });
  std::erase_if(arrivals_, [&](const Arrival& arrival) {
    if (arrival.path != path.index()) return false;
    peer_slots_[arrival.slot].filled = peer_slots_[arrival.slot].emptied;
    return true;
  });
}

void SlotLink::Refuse(const Arrival& arrival, std::string_view reason) {
  peer_slots_[arrival.slot].filled = peer_slots_[arrival.slot].emptied;
  Rail& rail = rails_[NicOf(arrival)];
  for (Path& path : rail.paths) ClosePath(rail, path, reason);
}

void SlotLink::OnMessage(std::span<const std::byte> message) {
  std::string_view rest(reinterpret_cast<const char*>(message.data()), message.size());
  const auto info = Take<PathEventInfo>(rest, "a path's message");
  const auto [rail, path] = PathOf(info.path);
  if (info.event == PathEvent::kClosed) return OnPeerClosed(*rail, *path, info, rest);
  if (info.event != PathEvent::kOpened) {
    Throw(ErrorCode::kTransport, "nothing that happens to a path is called ",
          static_cast<uint32_t>(info.event));
  }
  if (info.epoch != path->epoch() || path->state() != Path::State::kOpening) return;
  path->SetLive();
}

void SlotLink::OnPeerClosed(Rail& rail, Path& path, const PathEventInfo& info,
                            std::string_view rest) {
  if (info.epoch != path.epoch() || path.state() == Path::State::kDead) {
    Throw(ErrorCode::kTransport, "path ", info.path, " was closed twice");
  }
  for (size_t index = 0; index < slots_.size(); ++index) {
    const auto sequences = Take<SlotSequences>(rest, "a path's message");
    OnCredit(index, sequences.emptied);
    Slot& slot = slots_[index];
    if (slot.via.path == &path) slot.has_arrived = slot.sequence == sequences.filled;
  }
  path.peer_closed = info.replacement;
  if (path.state() == Path::State::kClosing) return Reopen(rail, path);
  ClosePath(rail, path, StrCat("the peer: ", rest));
}

void SlotLink::Kill() {
  for (Rail& rail : rails_) {
    for (Path& path : rail.paths) path.Kill();
  }
}

// Both ends have closed the path: nothing can reach the peer's slots over it any more, and what it
// had and did not bring is sent again.
void SlotLink::Reopen(Rail& rail, Path& path) {
  try {
    if (path.Reopen()) SendEvent(PathEvent::kOpened, path, {}, {});
  } catch (const Error& error) {
    ClosePath(rail, path, error.text());
  }
  for (size_t index = 0; index < slots_.size(); ++index) {
    Slot& slot = slots_[index];
    if (slot.via.path != &path) continue;
    slot.via = {};
    slot.is_posted = false;
    if (!slot.is_emptied && !slot.has_arrived) resends_.push_back(index);
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
