#include "xla_plugin/net/verbs/verbs_connection.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"

namespace jaxhet::verbs {
namespace {

using Clock = std::chrono::steady_clock;

// A message is divided among NIC pairs into chunks that are not shorter.
constexpr size_t kLeastChunkBytes = size_t{64} << 10;
constexpr size_t kAlignment = 128;
constexpr size_t kPageBytes = 4096;
constexpr size_t kDescriptionBytes = sizeof(ChunkInfo::description);
constexpr std::chrono::seconds kProofTimeout{5};

size_t NumSlots(Nics& nics) {
  return std::min(static_cast<size_t>(nics.options().depth) * nics.Usable().size(),
                  Link::kMostSlots);
}

// Polls until `is_over`, but for kProofTimeout at most.
template <typename IsOver>
bool PollUntil(Link& link, IsOver is_over) {
  const auto limit = Clock::now() + kProofTimeout;
  while (!is_over() && !link.is_lost() && Clock::now() < limit) link.Poll();
  return is_over();
}

}  // namespace

VerbsConnection::VerbsConnection(Nics& nics, size_t chunk_bytes, ConnectionHost& host)
    : VerbsConnection(nics, NumSlots(nics), std::min(chunk_bytes, kMostMessageBytes), host) {}

VerbsConnection::VerbsConnection(Nics& nics, size_t count, size_t chunk_bytes, ConnectionHost& host)
    : host_(host),
      outgoing_(std::make_unique<Staging>(nics.Usable(), count, RoundUp(chunk_bytes, kPageBytes),
                                          ibv::kAccessLocalWrite)),
      incoming_(std::make_unique<Staging>(nics.Usable(), count, RoundUp(chunk_bytes, kPageBytes),
                                          kPeerWrites)),
      link_(nics.Usable(), nics.options(),
            {.outgoing = outgoing_->slots(),
             .incoming = incoming_->slots(),
             .count = count,
             .chunk_bytes = chunk_bytes},
            host) {}

VerbsConnection::VerbsConnection(NicList nics, const Options& options,
                                 std::shared_ptr<DeviceSlots> slots, size_t count,
                                 Direction direction, ConnectionHost& host)
    : host_(host),
      slots_(std::move(slots)),
      link_(nics, options,
            {.outgoing = direction == Direction::kOut ? slots_->slots() : SlotMemory{},
             .incoming = direction == Direction::kIn ? slots_->slots() : SlotMemory{},
             .count = count,
             .chunk_bytes = slots_->slots().slot_bytes},
            host),
      sent_(count),
      arrived_(count) {}

void VerbsConnection::Begin(Transfer& transfer, std::string_view /*announcement*/) {
  if (transfer.sent < transfer.send.num_bytes()) sends_.push_back(&transfer);
}

void VerbsConnection::OnMessage(std::span<const std::byte> /*message*/) {
  Throw(ErrorCode::kTransport, "ends of `verbs` send each other no messages");
}

bool VerbsConnection::Advance() {
  link_.Poll();
  if (link_.is_lost()) return false;
  link_.SendCredits();
  for (size_t moved = 0; moved < kSliceBytes;) {
    const size_t num_bytes = Drain() + GiveBack() + Send();
    if (num_bytes == 0) break;
    moved += num_bytes;
  }
  if (link_.HasArrivals() || CanSend() || link_.IsBusy()) return true;
  if (!link_.Arm()) return false;
  link_.Poll();
  return link_.IsBusy();
}

// Takes one chunk; returns its bytes.
size_t VerbsConnection::Drain() {
  if (!link_.HasArrivals()) return 0;
  const Link::Arrival arrival = link_.FirstArrival();
  ChunkInfo info{};
  std::memcpy(&info, link_.arrived_header(arrival.slot), sizeof info);
  if (!CanDrain(arrival, info.ticket)) return 0;
  Transfer& transfer = host_.Find(info.ticket);
  Reserve(transfer, info);
  link_.TakeArrival();
  size_t num_bytes = info.num_bytes;
  if (slots_ != nullptr) {
    num_bytes += kDescriptionBytes;
    transfer.receive.CopyIn(0, info.description);
    arrived_[arrival.slot] = info.ticket;
  } else {
    transfer.receive.CopyIn(info.offset, {incoming_->slot(arrival.slot), num_bytes});
    link_.Empty(arrival.slot);
  }
  host_.Received(transfer, num_bytes);
  return num_bytes;
}

bool VerbsConnection::CanDrain(const Link::Arrival& arrival, uint64_t ticket) {
  if (slots_ != nullptr && ticket % link_.num_slots() != arrival.slot) {
    Throw(ErrorCode::kTransport, "the peer sent chunk ", ticket, " in slot ", arrival.slot);
  }
  if (!host_.IsReady(ticket)) return false;
  if (slots_ != nullptr) slots_->Flush(arrival.slot, arrival.nic);
  return true;
}

void VerbsConnection::Reserve(Transfer& transfer, const ChunkInfo& info) const {
  if (info.num_bytes > link_.chunk_bytes() || (slots_ != nullptr && info.offset != 0)) {
    Throw(ErrorCode::kTransport, "a chunk's bytes lie outside of its slot");
  }
  transfer.Reserve(info.offset, info.num_bytes + (slots_ == nullptr ? 0 : kDescriptionBytes));
}

// Gives the owner's slots back: to the peer what the device has emptied, and to the device what the
// peer has. Returns their number.
size_t VerbsConnection::GiveBack() {
  size_t count = 0;
  for (size_t slot = 0; slot < sent_.size(); ++slot) {
    const std::optional<uint64_t> arrived = arrived_[slot];
    if (arrived && host_.IsReady(*arrived + sent_.size())) {
      arrived_[slot].reset();
      link_.Empty(slot);
      ++count;
    }
    if (sent_[slot] != nullptr && link_.IsFree(slot)) {
      Transfer& transfer = *std::exchange(sent_[slot], nullptr);
      host_.Sent(transfer, transfer.send.num_bytes());
      ++count;
    }
  }
  return count;
}

size_t VerbsConnection::NextSlot() const {
  return (slots_ == nullptr ? num_sent_ : sends_.front()->peer_ticket) % link_.num_slots();
}

bool VerbsConnection::CanSend() const { return !sends_.empty() && link_.CanSend(NextSlot()); }

// Sends one chunk; returns its bytes.
size_t VerbsConnection::Send() {
  if (!CanSend()) return 0;
  const size_t slot = NextSlot();
  ++num_sent_;
  Transfer& transfer = *sends_.front();
  ChunkInfo info{transfer.peer_ticket, transfer.sent, 0, {}};
  if (slots_ == nullptr) {
    info.num_bytes = std::min(ChunkBytesOf(transfer.send.num_bytes()),
                              transfer.send.num_bytes() - transfer.sent);
    transfer.send.CopyOut(info.offset, {outgoing_->slot(slot), info.num_bytes});
  } else {
    info.num_bytes = transfer.send.num_bytes() - kDescriptionBytes;
    transfer.send.CopyOut(0, info.description);
    sent_[slot] = &transfer;
  }
  std::memcpy(link_.header(slot), &info, sizeof info);
  if (slots_ != nullptr || info.offset + info.num_bytes == transfer.send.num_bytes()) {
    sends_.pop_front();
  }
  link_.Send(slot, info.num_bytes);
  if (slots_ == nullptr) host_.Sent(transfer, info.num_bytes);
  return kHeaderBytes + info.num_bytes;
}

// Size of the chunks of a message of `num_bytes`, so that every NIC pair has some.
size_t VerbsConnection::ChunkBytesOf(size_t num_bytes) const {
  const size_t even = RoundUp(num_bytes / link_.num_nic_pairs(), kAlignment);
  return std::clamp(even, std::min(kLeastChunkBytes, link_.chunk_bytes()), link_.chunk_bytes());
}

void VerbsConnection::SendProof(size_t num_bytes) {
  link_.Send(0, num_bytes);
  if (PollUntil(link_, [this] { return link_.IsSent(0); })) return;
  Throw(ErrorCode::kTransport, "the peer's NIC has not answered");
}

bool VerbsConnection::AwaitProof() {
  if (!PollUntil(link_, [this] { return link_.HasArrivals(); })) return false;
  const Link::Arrival arrival = link_.FirstArrival();
  link_.TakeArrival();
  slots_->Flush(arrival.slot, arrival.nic);
  return arrival.slot == 0;
}

}  // namespace jaxhet::verbs
