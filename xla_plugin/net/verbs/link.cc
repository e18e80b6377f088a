#include "xla_plugin/net/verbs/link.h"

#include <arpa/inet.h>

#include <utility>

#include "xla_plugin/base/error.h"

namespace jaxhet::verbs {
namespace {

// Completions are polled for so long after the last one, before an event is waited for.
constexpr std::chrono::microseconds kSpin{100};

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
  const WorkId id = UnpackWorkId(wc.wr_id);
  Qp& qp = pair.qps.at(id.qp);
  if (id.is_receive) {
    OnImmediate(pair, UnpackImmediate(ntohl(wc.imm_data)));
    if (const int error = qp.PostReceive()) Fail(pair, ErrnoText("ibv_post_recv", error));
    return;
  }
  qp.OnSent(id.sent);
  if (id.sent.kind == ImmediateKind::kChunk) slots_.at(id.sent.slot).is_posted = false;
}

void Link::OnImmediate(const NicPair& pair, Immediate immediate) {
  if (immediate.slot >= slots_.size()) {
    Throw(ErrorCode::kTransport, "there is no slot ", int{immediate.slot});
  }
  if (immediate.kind == ImmediateKind::kCredit) {
    return OnCredit(immediate.slot, immediate.sequence);
  }
  PeerSlot& slot = peer_slots_[immediate.slot];
  const auto next = static_cast<uint16_t>(slot.tail + 1);
  if (incoming_.memory == nullptr || immediate.sequence != next || slot.tail != slot.head) {
    Throw(ErrorCode::kTransport, "slot ", int{immediate.slot}, " was filled out of order");
  }
  slot.tail = immediate.sequence;
  arrivals_.push_back({immediate.slot, pair.index});
}

void Link::OnCredit(size_t index, uint16_t sequence) {
  Slot& slot = slots_[index];
  if (slot.sequence == sequence) slot.is_emptied = true;
}

void Link::Send(size_t index, size_t num_bytes) {
  Slot& slot = slots_[index];
  ++slot.sequence;
  slot.is_emptied = false;
  const auto [pair, qp] = ChooseQp(/*for_credits=*/false, Qp::kSendsPerChunk);
  slot.is_posted = true;
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
  int error = qp->PostHeader(header);
  if (error == 0) {
    error = qp->Post(bytes, {ImmediateKind::kChunk, static_cast<uint8_t>(index), slot.sequence});
  }
  if (error != 0) Fail(*pair, ErrnoText("ibv_post_send", error));
}

void Link::Empty(size_t slot) {
  peer_slots_[slot].head = peer_slots_[slot].tail;
  credits_due_.push_back(slot);
  SendCredits();
}

void Link::SendCredits() {
  for (; !credits_due_.empty(); credits_due_.pop_front()) {
    const auto [pair, qp] = ChooseQp(/*for_credits=*/true, 1);
    if (pair == nullptr) return;
    const size_t slot = credits_due_.front();
    const Write nothing{.to = peer_headers_address_, .rkey = pair->peer_headers_rkey};
    const int error = qp->Post(
        nothing, {ImmediateKind::kCredit, static_cast<uint8_t>(slot), peer_slots_[slot].head});
    if (error != 0) return Fail(*pair, ErrnoText("ibv_post_send", error));
  }
}

// The queue pair for the purpose with the most room, and at least `num_sends`.
Link::Choice Link::ChooseQp(bool for_credits, uint32_t num_sends) const {
  Choice best;
  for (NicPair& pair : nic_pairs_) {
    for (Qp& qp : pair.qps) {
      const bool is_for_credits = &qp == &pair.qps.front();
      if (is_for_credits != for_credits || qp.room() < num_sends) continue;
      if (best.qp == nullptr || qp.room() > best.qp->room()) best = {&pair, &qp};
    }
  }
  return best;
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
  for (NicPair& pair : nic_pairs_) {
    for (Qp& qp : pair.qps) qp.Kill();
  }
}

}  // namespace jaxhet::verbs
