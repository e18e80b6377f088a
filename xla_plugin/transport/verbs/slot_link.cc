#include "xla_plugin/transport/verbs/slot_link.h"

#include <algorithm>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"
#include "xla_plugin/transport/verbs/wc_status.h"

namespace jaxhet::verbs {
namespace {

// Completions are polled for so long after the last one, before an event is waited for.
constexpr std::chrono::microseconds kSpin{100};
// The clock is looked at once in so many polls.
constexpr uint32_t kPollsPerLook = 16;
constexpr size_t kLeastPartBytes = size_t{128} << 10;
constexpr size_t kPacketBytes = 4096;  // the largest MTU

}  // namespace

std::vector<Pollable*> SlotLink::Pollables() {
  std::vector<Pollable*> pollables;
  for (NicPair& pair : nic_pairs_) {
    pollables.push_back(&pair.cq);
    pollables.push_back(pair.nic->context.get());
  }
  return pollables;
}

size_t SlotLink::PartBytes(size_t num_bytes) {
  return std::max(kLeastPartBytes, RoundUp(num_bytes, kMostParts * kPacketBytes) / kMostParts);
}

bool SlotLink::Arm() {
  bool armed = false;
  for (NicPair& pair : nic_pairs_) armed |= pair.cq.Arm();
  return armed;
}

void SlotLink::Poll() {
  LookAtNics();
  if (receives_due_.size() >= kReceiveBatch) Restock();
  bool is_idle = true;
  for (NicPair& pair : nic_pairs_) {
    std::span<const ibv::Wc> completions;
    do {
      completions = pair.cq.Poll(completions_, pair.name);
      for (const ibv::Wc& wc : completions) OnCompletion(pair, wc);
      is_idle &= completions.empty();
    } while (completions.size() == completions_.size());
  }
  if (is_idle) return OnIdlePoll();
  is_busy_ = true;
  idle_polls_ = 0;
}

void SlotLink::OnIdlePoll() {
  if (!is_busy_ || ++idle_polls_ % kPollsPerLook != 0) return;
  const Clock::time_point now = Clock::now();
  if (idle_polls_ == kPollsPerLook) idle_since_ = now;
  is_busy_ = now - idle_since_ < kSpin;
}

void SlotLink::Restock() {
  while (!receives_due_.empty()) {
    const auto [pair, qp] = receives_due_.back();
    receives_due_.pop_back();
    if (const int error = qp->Restock()) {
      CloseQp(*pair, *qp, ErrnoText("ibv_post_recv", error));
    }
  }
}

void SlotLink::OnCompletion(NicPair& pair, const ibv::Wc& wc) {
  const WorkId id = UnpackWorkId(wc.wr_id);
  QpPair& qp = *QpOf(id.qp).qp;
  // Completion of a closed queue pair: the peer has been told which chunks arrived.
  if (qp.is_closed()) return;
  if (wc.status != ibv::kWcSuccess) {
    if (IsFatal(wc.status)) {
      Throw(ErrorCode::kTransport, pair.name, ": ", Describe(wc),
            ": this is an error in jaxhet or its peer; please report it");
    }
    return CloseQp(pair, qp, Describe(wc));
  }
  if (id.is_receive) {
    receives_due_.push_back({&pair, &qp});
    return OnImmediate(qp, UnpackImmediate(wc.imm_data));
  }
  const int slot = qp.OnSent();
  if (slot == kNoSlot) return;
  slots_[static_cast<size_t>(slot)].is_posted = false;
  FreeIfDone(static_cast<size_t>(slot));
}

void SlotLink::OnImmediate(const QpPair& qp, Immediate immediate) {
  if (immediate.kind == ImmediateKind::kCredit) return OnCredit(immediate);
  CheckSlot(immediate);
  SlotSequences& slot = peer_slots_[immediate.slot];
  const auto next = static_cast<uint16_t>(slot.tail + 1);
  if (immediate.sequence != next || slot.tail != slot.head) {
    Throw(ErrorCode::kTransport, "slot ", int{immediate.slot}, " was filled out of order");
  }
  slot.tail = immediate.sequence;
  arrivals_.push_back({immediate.slot, qp.index()});
}

void SlotLink::OnCredits(std::span<const uint32_t> packed) {
  for (const uint32_t credit : packed) {
    if (credit == 0) return;
    OnCredit(UnpackImmediate(credit));
  }
}

void SlotLink::OnCredit(Immediate credit) {
  CheckSlot(credit);
  OnCredit(credit.slot, credit.sequence);
}

void SlotLink::CheckSlot(Immediate immediate) const {
  if (immediate.slot < slots_.size()) return;
  Throw(ErrorCode::kTransport, "there is no slot ", int{immediate.slot});
}

void SlotLink::OnCredit(size_t index, uint16_t sequence) {
  Slot& slot = slots_[index];
  if (slot.is_emptied || slot.sequence != sequence) return;  // known already
  slot.is_emptied = true;
  FreeIfDone(index);
}

void SlotLink::FreeIfDone(size_t index) {
  Slot& slot = slots_[index];
  if (!slot.IsFree()) return;
  slot.via = {};
  std::erase(resends_, index);
  free_.push_back(index);
}

std::optional<size_t> SlotLink::AnyFree() const {
  return free_.empty() ? std::nullopt : std::optional(free_.back());
}

bool SlotLink::HasRoom() const {
  return std::ranges::any_of(nic_pairs_, [&](const NicPair& pair) {
    return std::ranges::any_of(pair.qps,
                               [&](const QpPair& qp) { return qp.HasRoom(sends_per_slot_); });
  });
}

uint16_t SlotLink::Start(size_t index, size_t num_bytes) {
  return StartFrom(index, *outgoing_.memory, outgoing_.address(index), num_bytes);
}

uint16_t SlotLink::StartFrom(size_t index, const NicMemory& memory, uint64_t address,
                             size_t num_bytes) {
  std::erase(free_, index);
  Slot& slot = slots_[index];
  slot.memory = &memory;
  slot.address = address;
  ++slot.sequence;
  slot.num_bytes = static_cast<uint32_t>(num_bytes);
  slot.num_sent = 0;
  slot.is_emptied = slot.has_arrived = false;
  slot.via = ChooseQp(/*for_credits=*/false, sends_per_slot_);
  return slot.sequence;
}

void SlotLink::SendTo(size_t index, size_t end) {
  Slot& slot = slots_[index];
  Post(index, std::exchange(slot.num_sent, static_cast<uint32_t>(end)), end);
}

size_t SlotLink::Resend() {
  const Choice choice = ChooseQp(/*for_credits=*/false, sends_per_slot_);
  if (choice.qp == nullptr || resends_.empty()) return 0;
  const size_t index = resends_.front();
  resends_.pop_front();
  Slot& slot = slots_[index];
  slot.via = choice;
  Post(index, 0, slot.num_bytes);
  return slot.num_bytes;
}

// Sends [begin, end) of a slot. Where that fails, closing the queue pair will send all of it again.
void SlotLink::Post(size_t index, size_t begin, size_t end) {
  Slot& slot = slots_[index];
  const auto [pair, qp] = slot.via;
  if (qp == nullptr || !qp->is_live()) return;
  slot.is_posted = true;
  int error = begin == 0 && headers_ ? PostHeader(*pair, *qp, index) : 0;
  const Write write{.from = slot.address + begin,
                    .lkey = slot.memory->region(pair->index).lkey(),
                    .num_bytes = static_cast<uint32_t>(end - begin),
                    .to = peer_slots_address_ + index * peer_slot_bytes_ + begin,
                    .rkey = pair->peer_rkey};
  const Immediate immediate{ImmediateKind::kChunk, static_cast<uint8_t>(index), slot.sequence};
  if (error == 0) {
    error = end == slot.num_bytes ? qp->PostLast(write, immediate, static_cast<int>(index))
                                  : qp->PostFragment(write);
  }
  if (error != 0) CloseQp(*pair, *qp, ErrnoText("ibv_post_send", error));
}

int SlotLink::PostHeader(NicPair& pair, QpPair& qp, size_t index) {
  return qp.PostFragment({.from = headers_->slots().address(index),
                          .lkey = headers_->slots().region(pair.index).lkey(),
                          .num_bytes = kHeaderBytes,
                          .to = peer_headers_address_ + index * kHeaderBytes,
                          .rkey = pair.peer_headers_rkey});
}

void SlotLink::Empty(size_t slot) {
  peer_slots_[slot].head = peer_slots_[slot].tail;
  credits_due_.push_back(slot);
}

Immediate SlotLink::NextCredit() {
  const size_t slot = credits_due_.front();
  credits_due_.pop_front();
  return {ImmediateKind::kCredit, static_cast<uint8_t>(slot), peer_slots_[slot].head};
}

void SlotLink::TakeCredits(std::span<uint32_t> packed) {
  for (uint32_t& credit : packed) credit = credits_due_.empty() ? 0 : Pack(NextCredit());
}

void SlotLink::SendCredits() {
  while (!credits_due_.empty()) {
    const auto [pair, qp] = ChooseQp(/*for_credits=*/true, 1);
    if (qp == nullptr) return;
    const Write nothing{.to = peer_slots_address_, .rkey = pair->peer_rkey};
    const int error = qp->PostLast(nothing, NextCredit(), kNoSlot);
    // Closing the queue pair repeats the credit.
    if (error != 0) CloseQp(*pair, *qp, ErrnoText("ibv_post_send", error));
  }
}

// The live queue pair with room for `num_sends` that has the least to do; one that was not made for
// the purpose if there is no other.
SlotLink::Choice SlotLink::ChooseQp(bool for_credits, uint32_t num_sends) {
  Choice best;
  std::pair<bool, size_t> least;
  for (NicPair& pair : nic_pairs_) {
    for (QpPair& qp : pair.qps) {
      if (!qp.HasRoom(num_sends)) continue;
      const bool is_for_credits = &qp == &pair.qps.front();
      const std::pair cost{is_for_credits != for_credits, qp.bytes_in_flight()};
      if (best.qp != nullptr && least <= cost) continue;
      best = {&pair, &qp};
      least = cost;
    }
  }
  return best;
}

}  // namespace jaxhet::verbs
