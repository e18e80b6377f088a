#ifndef XLA_PLUGIN_NET_VERBS_LINK_H_
#define XLA_PLUGIN_NET_VERBS_LINK_H_

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "xla_plugin/net/connection.h"
#include "xla_plugin/net/verbs/device.h"
#include "xla_plugin/net/verbs/memory.h"
#include "xla_plugin/net/verbs/nics.h"
#include "xla_plugin/net/verbs/qp.h"
#include "xla_plugin/net/verbs/wire.h"

namespace jaxhet::verbs {

// Moves slots to the slots of a peer that correspond to them, each with its header, over all NICs.
//
// A NIC pair joins our NIC i with the peer's NIC i by several queue pairs; the first of them is for
// credits, which would wait behind chunks on the others. A slot is sent over one queue pair: the
// one that has the most room. A queue pair that fails is the loss of the peer.
class Link {
 public:
  static constexpr size_t kMostSlots = 256;  // Immediate::slot

  // The memories outlive the link.
  struct Slots {
    SlotMemory outgoing;  // without memory: nothing is sent
    SlotMemory incoming;  // or received
    size_t count;
    size_t chunk_bytes;  // bytes of a slot that may be sent
  };
  Link(NicList nics, Options options, const Slots& slots, ConnectionHost& host);
  ~Link();
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  // Set-up: each end's offer is for the other's Accept().
  std::string Offer() const;
  void Accept(std::string_view offer);

  size_t chunk_bytes() const { return chunk_bytes_; }  // the smaller of both ends'
  size_t num_slots() const { return slots_.size(); }
  size_t num_data_qps() const { return nic_pairs_.size() * (nic_pairs_.front().qps.size() - 1); }
  bool is_lost() const { return is_lost_; }

  std::vector<Pollable*> Pollables();
  // Takes completions.
  void Poll();
  // Polled a moment ago with success: more is likely to come.
  bool IsBusy() const { return Clock::now() < busy_until_; }
  // Lets the next completion raise an event; see CompletionQueue::Arm().
  bool Arm();

  // Sending. A slot is free when the peer has emptied it and the NIC needs it no more.
  bool IsFree(size_t slot) const { return !slots_[slot].is_posted && slots_[slot].is_emptied; }
  bool CanSend(size_t slot) const {
    return IsFree(slot) && ChooseQp(/*for_credits=*/false, Qp::kSendsPerChunk).pair != nullptr;
  }
  // The NIC has sent it.
  bool IsSent(size_t slot) const { return !slots_[slot].is_posted; }
  std::byte* header(size_t slot) const { return headers_.slot(slot); }
  // Sends the header and `num_bytes` of a slot that can be sent.
  void Send(size_t index, size_t num_bytes);

  // Receiving.
  struct Arrival {
    size_t slot;
    size_t nic;  // index of the NIC of ours
  };
  bool HasArrivals() const { return !arrivals_.empty(); }
  const Arrival& FirstArrival() const { return arrivals_.front(); }
  const std::byte* arrived_header(size_t slot) const { return arrived_headers_.slot(slot); }
  void TakeArrival() { arrivals_.pop_front(); }
  // Gives the slot of a taken arrival back to the peer, by a credit.
  void Empty(size_t slot);
  // Sends the credits for which there was no room.
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
    std::deque<Qp> qps;
    uint32_t peer_rkey = 0;
    uint32_t peer_headers_rkey = 0;
    std::string name;  // "mlx5_0:1 (::ffff:10.0.0.1) to mlx5_1:1 (::ffff:10.0.0.2)"
  };

  struct Choice {
    NicPair* pair = nullptr;  // null: there is no room
    Qp* qp = nullptr;
  };

  // A slot of ours and the peer's that it is sent to.
  struct Slot {
    uint16_t sequence = 0;   // number of the slot's uses
    bool is_posted = false;  // the NIC may read it
    bool is_emptied = true;  // by the peer
  };
  // A slot of the peer's, in our memory.
  struct PeerSlot {
    uint16_t tail = 0;  // sequence of the last chunk written
    uint16_t head = 0;  // sequence of the last chunk read
  };

  void OnCompletion(NicPair& pair, const ibv::Wc& wc);
  void OnImmediate(const NicPair& pair, Immediate immediate);
  void OnCredit(size_t index, uint16_t sequence);
  Choice ChooseQp(bool for_credits, uint32_t num_sends) const;
  void Fail(const NicPair& pair, std::string_view reason);
  void SetUpNicPair(NicPair& pair, NicPairInfo peer, std::span<const QpInfo> qps);  // link_setup.cc

  Options options_;
  ConnectionHost& host_;
  SlotMemory outgoing_;
  SlotMemory incoming_;
  size_t chunk_bytes_;
  Staging headers_;
  Staging arrived_headers_;
  size_t peer_slot_bytes_ = 0;
  uint64_t peer_slots_address_ = 0;
  uint64_t peer_headers_address_ = 0;
  mutable std::deque<NicPair> nic_pairs_;

  std::vector<Slot> slots_;
  std::vector<PeerSlot> peer_slots_;
  std::deque<Arrival> arrivals_;
  std::deque<size_t> credits_due_;       // slots of the peer's that we have emptied
  std::array<ibv::Wc, 32> completions_;  // completions of one poll
  Clock::time_point busy_until_;
  bool is_lost_ = false;
};

}  // namespace jaxhet::verbs

#endif  // XLA_PLUGIN_NET_VERBS_LINK_H_
