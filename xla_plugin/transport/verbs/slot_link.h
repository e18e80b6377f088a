#ifndef XLA_PLUGIN_TRANSPORT_VERBS_SLOT_LINK_H_
#define XLA_PLUGIN_TRANSPORT_VERBS_SLOT_LINK_H_

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "xla_plugin/transport/transport.h"
#include "xla_plugin/transport/verbs/device.h"
#include "xla_plugin/transport/verbs/nics.h"
#include "xla_plugin/transport/verbs/qp_pair.h"
#include "xla_plugin/transport/verbs/slot_memory.h"
#include "xla_plugin/transport/verbs/wire.h"

namespace jaxhet::verbs {

// Moves slots to the slots of a peer that correspond to them, each once, over all NICs.
//
// A NIC pair joins our NIC i with the peer's NIC i by several queue pairs; the first of them is for
// credits, which would wait behind chunks on the others. A slot is sent over one queue pair: the
// one that has the least to do.
//
// When a queue pair fails, each end kills its own and says so over another connection, with the
// slots that it has taken and emptied. Once both have, no late packet can reach the slots. Chunks
// of the queue pair that the peer has not taken are sent again over others. Nothing is written
// while somebody may read it. The loss of the last queue pair is the loss of the peer.
class SlotLink {
 public:
  // With each slot of `outgoing` may go a header of kHeaderBytes, in host memory at both ends.
  enum class Headers { kNone, kOfEachSlot };
  static constexpr size_t kHeaderBytes = 64;

  // A slot may be sent in parts, while it is filled: so many of PartBytes(), or fewer.
  static constexpr size_t kMostParts = 4;
  // For `num_bytes` of a slot. No part is short, and each ends where a packet does.
  static size_t PartBytes(size_t num_bytes);
  static constexpr size_t kMostSlots = 256;  // Immediate::slot
  // So many receives are put back at once: no message waits for its own.
  static constexpr size_t kReceiveBatch = 8;

  // The memories outlive the link.
  struct Slots {
    SlotMemory outgoing;
    SlotMemory incoming;
    size_t count;
    size_t chunk_bytes;  // bytes of a slot that may be sent
    Headers headers = Headers::kNone;
  };
  SlotLink(NicMemory::NicList nics, Options options, const Slots& slots, PeerHost& host);
  ~SlotLink();
  SlotLink(const SlotLink&) = delete;
  SlotLink& operator=(const SlotLink&) = delete;

  // Set-up: each end's offer is for the other's Accept().
  std::string Offer() const;
  void Accept(std::string_view offer);

  size_t chunk_bytes() const { return chunk_bytes_; }  // the smaller of both ends'
  size_t num_slots() const { return slots_.size(); }
  size_t num_data_qps() const { return nic_pairs_.size() * (nic_pairs_.front().qps.size() - 1); }

  std::vector<Pollable*> Pollables();
  // The peer has closed a queue pair.
  void OnMessage(std::span<const std::byte> message);
  // Takes completions, and reacts to failures of NICs.
  void Poll();
  // Polled a moment ago with success: more is likely to come.
  bool IsBusy() const { return is_busy_; }
  // Lets the next completion raise an event; see CompletionQueue::Arm().
  bool Arm();

  // Sending. A slot is free when the peer has emptied it and the NIC needs it no more.
  bool IsFree(size_t slot) const { return slots_[slot].IsFree(); }
  bool IsSent(size_t slot) const { return !slots_[slot].is_posted && !HasResends(); }
  std::optional<size_t> AnyFree() const;
  bool HasRoom() const;
  std::byte* header(size_t slot) const { return headers_->slot(slot); }
  // The free slot will be sent, `num_bytes` of it; there is room. Returns the sequence.
  uint16_t Start(size_t index, size_t num_bytes);
  // Like Start(), for bytes that lie elsewhere and stay there until the slot is free again.
  uint16_t StartFrom(size_t index, const NicMemory& memory, uint64_t address, size_t num_bytes);
  // Sends the next part, up to `end`; the last one ends at `num_bytes`.
  void SendTo(size_t index, size_t end);
  // Whether chunks of a failed queue pair must be sent again, before anything else.
  bool HasResends() const { return !resends_.empty(); }
  size_t Resend();  // one slot, if there is room; returns its bytes

  // Receiving.
  struct Arrival {
    size_t slot;
    uint32_t qp;  // queue pair of the arrival
  };
  bool HasArrivals() const { return !arrivals_.empty(); }
  const Arrival& FirstArrival() const { return arrivals_.front(); }
  size_t NicOf(const Arrival& arrival) const { return arrival.qp / nic_pairs_.front().qps.size(); }
  void TakeArrival() { arrivals_.pop_front(); }
  uint16_t sequence_of_arrived(size_t slot) const { return peer_slots_[slot].tail; }
  const std::byte* arrived_header(size_t slot) const { return arrived_headers_->slot(slot); }
  // We need the arrived slot no more; the peer learns of it by a credit.
  void Empty(size_t slot);
  size_t num_credits_due() const { return credits_due_.size(); }
  // Credits go by themselves, or with a chunk: `packed` Immediates, 0 behind the last.
  void TakeCredits(std::span<uint32_t> packed);
  void OnCredits(std::span<const uint32_t> packed);
  // The arrived chunk can't be used: the queue pairs over this NIC are closed, and it is sent
  // again.
  void Refuse(const Arrival& arrival, std::string_view reason);
  void SendCredits();

  // Nothing goes out any more, or comes in: the NICs leave all memory alone.
  void Kill();

 private:
  using Clock = std::chrono::steady_clock;

  struct NicPair {
    NicPair(std::shared_ptr<Nic> its_nic, size_t its_index, int num_entries)
        : nic(std::move(its_nic)), index(its_index), cq(*nic->context, num_entries) {}

    std::shared_ptr<Nic> nic;
    size_t index;
    CompletionQueue cq;
    std::deque<QpPair> qps;
    uint32_t peer_rkey = 0;
    uint32_t peer_headers_rkey = 0;
    std::string name;  // "mlx5_0:1 (::ffff:10.0.0.1) to mlx5_1:1 (::ffff:10.0.0.2)"
    uint64_t seen_events = 0;
    std::string seen_problem;  // the NIC's problem, if there was one
  };

  struct Choice {
    NicPair* pair = nullptr;
    QpPair* qp = nullptr;
  };

  // A slot of ours and the peer's that it is sent to.
  struct Slot {
    const NicMemory* memory = nullptr;  // the slot is sent from there
    uint64_t address = 0;
    uint16_t sequence = 0;   // number of the slot's uses
    uint32_t num_bytes = 0;  // to send
    uint32_t num_sent = 0;
    Choice via;                // queue pair of the last post
    bool is_posted = false;    // the NIC may read it
    bool has_arrived = false;  // over a queue pair that has failed since
    bool is_emptied = true;    // by the peer
    bool IsFree() const { return !is_posted && is_emptied; }
  };

  // slot_link.cc: chunks and credits
  void Restock();
  void OnIdlePoll();
  void OnCompletion(NicPair& pair, const ibv::Wc& wc);
  void OnImmediate(const QpPair& qp, Immediate immediate);
  void CheckSlot(Immediate immediate) const;
  Immediate NextCredit();
  void OnCredit(Immediate credit);
  void OnCredit(size_t index, uint16_t sequence);
  void FreeIfDone(size_t index);
  void Post(size_t index, size_t begin, size_t end);
  int PostHeader(NicPair& pair, QpPair& qp, size_t index);
  Choice ChooseQp(bool for_credits, uint32_t num_sends);

  // slot_link_qps.cc: set-up and failure
  void SetUpNicPair(NicPair& pair, NicPairInfo peer, std::span<const QpInfo> qps);
  void LookAtNics();
  void CloseQp(NicPair& pair, QpPair& qp, std::string_view reason);
  void Forget(const QpPair& qp);
  void OnBothClosed(QpPair& qp);
  size_t NumLiveQps() const;
  Choice QpOf(uint32_t index);

  Options options_;
  PeerHost& host_;
  SlotMemory outgoing_;
  SlotMemory incoming_;
  size_t chunk_bytes_;
  uint32_t sends_per_slot_;
  std::unique_ptr<Staging> headers_;  // null for Headers::kNone
  std::unique_ptr<Staging> arrived_headers_;
  size_t peer_slot_bytes_ = 0;
  uint64_t peer_slots_address_ = 0;
  uint64_t peer_headers_address_ = 0;
  std::deque<NicPair> nic_pairs_;

  std::vector<Slot> slots_;
  std::vector<SlotSequences> peer_slots_;  // in our memory
  std::vector<size_t> free_;
  std::deque<size_t> resends_;
  std::deque<Arrival> arrivals_;
  std::deque<size_t> credits_due_;       // slots of the peer's that we have emptied
  std::vector<Choice> receives_due_;     // queue pairs, once for each receive that has completed
  std::array<ibv::Wc, 32> completions_;  // completions of one poll
  bool is_busy_ = false;
  uint32_t idle_polls_ = 0;  // since the last completion, while busy
  Clock::time_point idle_since_;
  std::string last_failure_;  // the last failure of a queue pair
};

}  // namespace jaxhet::verbs

#endif  // XLA_PLUGIN_TRANSPORT_VERBS_SLOT_LINK_H_
