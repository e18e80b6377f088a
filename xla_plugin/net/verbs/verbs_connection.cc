#include "xla_plugin/net/verbs/verbs_connection.h"

#include <arpa/inet.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"

namespace jaxhet::verbs {
namespace {

constexpr size_t kMostSlots = 256;  // Immediate::slot
// A message is divided among NIC pairs into chunks that are not shorter.
constexpr size_t kLeastChunkBytes = size_t{64} << 10;
constexpr size_t kAlignment = 128;
constexpr size_t kPageBytes = 4096;
constexpr size_t kDescriptionBytes = sizeof(ChunkInfo::description);
constexpr std::chrono::seconds kProofTimeout{5};
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

// Sends: `depth` chunks, and a credit for each slot. Receives: a chunk and a credit for each slot.
// A queue pair that fails leaves completions of all that was posted.
VerbsConnection::NicPair::NicPair(std::shared_ptr<Nic> its_nic, size_t its_index,
                                  const Options& options, uint32_t num_slots)
    : nic(std::move(its_nic)),
      index(its_index),
      cq(*nic->context, static_cast<int>(kSendsPerChunk * options.depth + int64_t{3} * num_slots)),
      qp(nic->domain, cq,
         {.sends = kSendsPerChunk * static_cast<uint32_t>(options.depth) + num_slots,
          .receives = 2 * num_slots},
         nic->info.port, static_cast<uint16_t>(options.pkey_index)),
      room(kSendsPerChunk * static_cast<uint32_t>(options.depth) + num_slots) {}

VerbsConnection::Memory VerbsConnection::MakeStaging(Nics& nics, size_t chunk_bytes) {
  const size_t depth = static_cast<size_t>(nics.options().depth) * nics.Usable().size();
  const size_t count = std::min(depth, kMostSlots);
  chunk_bytes = std::min(chunk_bytes, kMostMessageBytes);
  const size_t slot_bytes = RoundUp(chunk_bytes, kPageBytes);
  auto out = std::make_unique<Staging>(nics.Usable(), count, slot_bytes, ibv::kAccessLocalWrite);
  auto in = std::make_unique<Staging>(nics.Usable(), count, slot_bytes, kPeerWrites);
  const auto [outgoing, incoming] = std::pair(out->slots(), in->slots());
  return {.device = nullptr,
          .out = std::move(out),
          .in = std::move(in),
          .outgoing = outgoing,
          .incoming = incoming,
          .count = count,
          .chunk_bytes = chunk_bytes};
}

VerbsConnection::VerbsConnection(Nics& nics, size_t chunk_bytes, ConnectionHost& host)
    : VerbsConnection(nics.Usable(), nics.options(), MakeStaging(nics, chunk_bytes), host) {}

VerbsConnection::VerbsConnection(NicList nics, const Options& options,
                                 const std::shared_ptr<DeviceSlots>& slots, size_t count,
                                 Direction direction, ConnectionHost& host)
    : VerbsConnection(nics, options,
                      {.device = slots,
                       .out = nullptr,
                       .in = nullptr,
                       .outgoing = direction == Direction::kOut ? slots->slots() : SlotMemory{},
                       .incoming = direction == Direction::kIn ? slots->slots() : SlotMemory{},
                       .count = count,
                       .chunk_bytes = slots->slots().slot_bytes},
                      host) {}

VerbsConnection::VerbsConnection(NicList nics, Options options, Memory memory, ConnectionHost& host)
    : options_(std::move(options)),
      host_(host),
      memory_(std::move(memory)),
      headers_(nics, memory_.count, kHeaderBytes, ibv::kAccessLocalWrite),
      arrived_headers_(nics, memory_.count, kHeaderBytes, kPeerWrites),
      slots_(memory_.count) {
  for (size_t i = 0; i < nics.size(); ++i) {
    for (int64_t q = 0; q < options_.qps; ++q) {
      nic_pairs_.emplace_back(nics[i], i, options_, static_cast<uint32_t>(slots_.size()));
    }
  }
}

std::string VerbsConnection::Offer() {
  std::string offer;
  Append(offer, OfferInfo{.magic = kOfferMagic,
                          .num_nic_pairs = static_cast<uint32_t>(nic_pairs_.size()),
                          .num_slots = static_cast<uint32_t>(slots_.size()),
                          .slot_bytes = memory_.incoming.slot_bytes,
                          .chunk_bytes = memory_.chunk_bytes,
                          .slots = memory_.incoming.address(0),
                          .headers = arrived_headers_.slots().address(0)});
  for (const NicPair& pair : nic_pairs_) {
    NicPairInfo info = InfoOf(pair.nic->info);
    info.rkey = memory_.incoming.rkey(pair.index);
    info.headers_rkey = arrived_headers_.slots().rkey(pair.index);
    info.qp_num = pair.qp.number();
    info.psn = pair.qp.psn();
    Append(offer, info);
  }
  return offer;
}

void VerbsConnection::Accept(std::string_view offer) {
  const OfferInfo info = TakeOffer(offer);
  while (nic_pairs_.size() > info.num_nic_pairs) nic_pairs_.pop_back();
  slots_.resize(std::min<size_t>(slots_.size(), info.num_slots));
  memory_.chunk_bytes = std::min<size_t>(memory_.chunk_bytes, info.chunk_bytes);
  peer_slot_bytes_ = info.slot_bytes;
  peer_slots_address_ = info.slots;
  peer_headers_address_ = info.headers;
  for (NicPair& pair : nic_pairs_) SetUpNicPair(pair, Take<NicPairInfo>(offer, kOffer));
}

void VerbsConnection::SetUpNicPair(NicPair& pair, NicPairInfo peer) {
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
  pair.qp.Connect(own, options_, peer);
}

std::vector<Pollable*> VerbsConnection::Pollables() {
  std::vector<Pollable*> pollables;
  for (NicPair& pair : nic_pairs_) pollables.push_back(&pair.cq);
  return pollables;
}

void VerbsConnection::Begin(Transfer& transfer, std::string_view /*announcement*/) {
  if (transfer.sent < transfer.send.num_bytes()) sends_.push_back(&transfer);
}

void VerbsConnection::OnMessage(std::span<const std::byte> /*message*/) {
  Throw(ErrorCode::kTransport, "ends of `verbs` send each other no messages");
}

bool VerbsConnection::Advance() {
  Poll();
  if (is_lost_) return false;
  SendCredits();
  for (size_t moved = 0; moved < kSliceBytes;) {
    const size_t num_bytes = Drain() + GiveBack() + Send();
    if (num_bytes == 0) break;
    moved += num_bytes;
  }
  if (!arrivals_.empty() || CanSend() || IsBusy()) return true;
  bool is_armed = false;
  for (NicPair& pair : nic_pairs_) is_armed |= pair.cq.Arm();
  if (!is_armed) return false;
  Poll();
  return IsBusy();
}

void VerbsConnection::Poll() {
  for (NicPair& pair : nic_pairs_) {
    std::span<const ibv::Wc> completions;
    do {
      completions = pair.cq.Poll(completions_, pair.name);
      for (const ibv::Wc& wc : completions) OnCompletion(pair, wc);
      if (!completions.empty()) busy_until_ = Clock::now() + kSpin;
    } while (completions.size() == completions_.size());
  }
}

void VerbsConnection::OnCompletion(NicPair& pair, const ibv::Wc& wc) {
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

void VerbsConnection::OnImmediate(const NicPair& pair, Immediate immediate) {
  if (immediate.slot >= slots_.size()) {
    Throw(ErrorCode::kTransport, "there is no slot ", int{immediate.slot});
  }
  Slot& slot = slots_[immediate.slot];
  if (immediate.kind == ImmediateKind::kCredit) {
    slot.is_emptied = true;
    return;
  }
  if (memory_.incoming.memory == nullptr || slot.is_filled) {
    Throw(ErrorCode::kTransport, "slot ", int{immediate.slot}, " was filled twice");
  }
  slot.is_filled = true;
  arrivals_.push_back({immediate.slot, pair.index});
}

void VerbsConnection::Fail(const NicPair& pair, std::string_view reason) {
  if (std::exchange(is_lost_, true)) return;
  Kill();
  host_.Lost(StrCat(pair.name, ": ", reason,
                    ". Check link and switch, that the GIDs of both ends are in one network "
                    "(JAXHET_VERBS_GID_INDEX), and for RoCE the flow control of its traffic "
                    "class (JAXHET_VERBS_TRAFFIC_CLASS). Report an error of access, protection or "
                    "length: jaxhet or its peer has made it"));
}

void VerbsConnection::Kill() {
  for (NicPair& pair : nic_pairs_) pair.qp.Kill();
}

VerbsConnection::NicPair* VerbsConnection::WithRoom(uint32_t num_sends) {
  const auto best = std::ranges::max_element(nic_pairs_, {}, &NicPair::room);
  return best->room >= num_sends ? &*best : nullptr;
}

bool VerbsConnection::CanSend() {
  return !sends_.empty() && IsFree(slots_[NextSlot()]) && WithRoom(kSendsPerChunk) != nullptr;
}

// Sends one chunk; returns its bytes.
size_t VerbsConnection::Send() {
  if (!CanSend()) return 0;
  const size_t slot = NextSlot();
  ++num_sent_;
  Transfer& transfer = *sends_.front();
  ChunkInfo info{transfer.peer_ticket, transfer.sent, 0, {}};
  const size_t total = transfer.send.num_bytes();
  if (memory_.device == nullptr) {
    info.num_bytes = std::min(ChunkBytesOf(total), total - transfer.sent);
    transfer.send.CopyOut(info.offset, {memory_.out->slot(slot), info.num_bytes});
  } else {
    info.num_bytes = total - kDescriptionBytes;
    transfer.send.CopyOut(0, info.description);
    slots_[slot].sent = &transfer;
  }
  std::memcpy(headers_.slot(slot), &info, sizeof info);
  if (memory_.device != nullptr || info.offset + info.num_bytes == total) sends_.pop_front();
  Post(slot, info.num_bytes);
  if (memory_.device == nullptr) host_.Sent(transfer, info.num_bytes);
  return kHeaderBytes + info.num_bytes;
}

// Size of the chunks of a message of `num_bytes`, so that every NIC pair has some.
size_t VerbsConnection::ChunkBytesOf(size_t num_bytes) const {
  const size_t even = RoundUp(num_bytes / nic_pairs_.size(), kAlignment);
  return std::clamp(even, std::min(kLeastChunkBytes, memory_.chunk_bytes), memory_.chunk_bytes);
}

void VerbsConnection::Post(size_t index, size_t num_bytes) {
  slots_[index].is_posted = true;
  slots_[index].is_emptied = false;
  NicPair* const pair = WithRoom(kSendsPerChunk);
  pair->room -= kSendsPerChunk;
  const Write header{.from = headers_.slots().address(index),
                     .lkey = headers_.slots().lkey(pair->index),
                     .num_bytes = kHeaderBytes,
                     .to = peer_headers_address_ + index * kHeaderBytes,
                     .rkey = pair->peer_headers_rkey};
  const Write bytes{.from = memory_.outgoing.address(index),
                    .lkey = memory_.outgoing.lkey(pair->index),
                    .num_bytes = static_cast<uint32_t>(num_bytes),
                    .to = peer_slots_address_ + index * peer_slot_bytes_,
                    .rkey = pair->peer_rkey};
  int error = pair->qp.PostWrite(header);
  if (error == 0) {
    error = pair->qp.PostWrite(bytes, {ImmediateKind::kChunk, static_cast<uint8_t>(index)});
  }
  if (error != 0) Fail(*pair, ErrnoText("ibv_post_send", error));
}

// Takes one chunk; returns its bytes.
size_t VerbsConnection::Drain() {
  if (arrivals_.empty()) return 0;
  const auto [slot, nic] = arrivals_.front();
  DeviceSlots* const device = memory_.device.get();
  ChunkInfo info{};
  std::memcpy(&info, arrived_headers_.slot(slot), sizeof info);
  if (device != nullptr && info.ticket % slots_.size() != slot) {
    Throw(ErrorCode::kTransport, "the peer sent chunk ", info.ticket, " in slot ", slot);
  }
  if (!host_.IsReady(info.ticket)) return 0;
  if (device != nullptr) device->Flush(slot, nic);
  if (info.num_bytes > memory_.chunk_bytes || (device != nullptr && info.offset != 0)) {
    Throw(ErrorCode::kTransport, "a chunk's bytes lie outside of its slot");
  }
  Transfer& transfer = host_.Find(info.ticket);
  const size_t num_bytes = info.num_bytes + (device == nullptr ? 0 : kDescriptionBytes);
  transfer.Reserve(info.offset, num_bytes);
  arrivals_.pop_front();
  if (device != nullptr) {
    transfer.receive.CopyIn(0, info.description);
    slots_[slot].arrived = info.ticket;
  } else {
    transfer.receive.CopyIn(info.offset, {memory_.in->slot(slot), num_bytes});
    Empty(slot);
  }
  host_.Received(transfer, num_bytes);
  return num_bytes;
}

// Gives the owner's slots back: to the peer what the device has emptied, and to the device what the
// peer has. Returns their number.
size_t VerbsConnection::GiveBack() {
  if (memory_.device == nullptr) return 0;
  size_t count = 0;
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (slot.arrived && host_.IsReady(*slot.arrived + slots_.size())) {
      slot.arrived.reset();
      Empty(i);
      ++count;
    }
    if (slot.sent != nullptr && IsFree(slot)) {
      Transfer& transfer = *std::exchange(slot.sent, nullptr);
      host_.Sent(transfer, transfer.send.num_bytes());
      ++count;
    }
  }
  return count;
}

void VerbsConnection::Empty(size_t slot) {
  slots_[slot].is_filled = false;
  credits_due_.push_back(static_cast<uint8_t>(slot));
  SendCredits();
}

void VerbsConnection::SendCredits() {
  for (; !credits_due_.empty(); credits_due_.pop_front()) {
    NicPair* const pair = WithRoom(1);
    if (pair == nullptr) return;
    --pair->room;
    const Write nothing{.to = peer_headers_address_, .rkey = pair->peer_headers_rkey};
    const int error = pair->qp.PostWrite(nothing, {ImmediateKind::kCredit, credits_due_.front()});
    if (error != 0) return Fail(*pair, ErrnoText("ibv_post_send", error));
  }
}

// Polls until `is_over`, but for kProofTimeout at most.
template <typename IsOver>
bool VerbsConnection::PollUntil(IsOver is_over) {
  const auto limit = Clock::now() + kProofTimeout;
  while (!is_over() && !is_lost_ && Clock::now() < limit) Poll();
  return is_over();
}

void VerbsConnection::SendProof(size_t num_bytes) {
  Post(0, num_bytes);
  if (PollUntil([this] { return !slots_[0].is_posted; })) return;
  Throw(ErrorCode::kTransport, "the peer's NIC has not answered");
}

bool VerbsConnection::AwaitProof() {
  if (!PollUntil([this] { return !arrivals_.empty(); })) return false;
  const auto [slot, nic] = arrivals_.front();
  arrivals_.pop_front();
  memory_.device->Flush(slot, nic);
  return slot == 0;
}

}  // namespace jaxhet::verbs
