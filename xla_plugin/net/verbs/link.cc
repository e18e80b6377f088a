#include "xla_plugin/net/verbs/link.h"

#include <arpa/inet.h>

#include <algorithm>
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

}  // namespace jaxhet::verbs
