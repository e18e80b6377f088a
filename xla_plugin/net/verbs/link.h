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
#include "xla_plugin/net/verbs/wire.h"

namespace jaxhet::verbs {

// Moves slots to the slots of a peer that correspond to them, each with its header, over all NICs.
//
// A NIC pair joins a NIC of ours with one of the peer's by a queue pair for chunks and credits.
// With `Options::qps` of them for each NIC, a network can use several paths. A slot is sent over
// the NIC pair that has the most room. If a queue pair fails, the peer is lost.
class Link {
 public:
  static constexpr size_t kMostSlots = 256;  // Immediate::slot

  // The memories outlive the link.
  struct Slots {
    SlotMemory outgoing;  // without memory: this end sends nothing
    SlotMemory incoming;  // without memory: this end receives nothing
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
  size_t num_nic_pairs() const { return nic_pairs_.size(); }
  bool is_lost() const { return is_lost_; }

  std::vector<Pollable*> Pollables();
  // Handles all completions that have arrived.
  void Poll();
  // Poll() found completions a moment ago, and will probably find more.
  bool IsBusy() const { return Clock::now() < busy_until_; }
  // Lets the next completion raise an event; see CompletionQueue::Arm().
  bool Arm();

  // Sending. A slot is free when the peer has emptied it and the NIC no longer reads it.
  bool IsFree(size_t slot) const { return !slots_[slot].is_posted && slots_[slot].is_emptied; }
  bool CanSend(size_t slot) const { return IsFree(slot) && WithRoom(kSendsPerChunk) != nullptr; }
  // Whether the NIC has sent the slot.
  bool IsSent(size_t slot) const { return !slots_[slot].is_posted; }
  std::byte* header(size_t slot) const { return headers_.slot(slot); }
  // Sends the header and `num_bytes` of a slot that can be sent.
  void Send(size_t index, size_t num_bytes);

  // Receiving.
  struct Arrival {
    size_t slot;
    size_t nic;  // index of our NIC
  };
  bool HasArrivals() const { return !arrivals_.empty(); }
  const Arrival& FirstArrival() const { return arrivals_.front(); }
  const std::byte* arrived_header(size_t slot) const { return arrived_headers_.slot(slot); }
  void TakeArrival() { arrivals_.pop_front(); }
  // Gives the slot of an arrival that was taken back to the peer, by a credit.
  void Empty(size_t slot);
  // Sends the credits that had no room before.
  void SendCredits();

  // Stops all queue pairs: NICs no longer read or write our memory.
  void Kill();

 private:
  using Clock = std::chrono::steady_clock;

  static constexpr uint32_t kSendsPerChunk = 2;  // header and bytes

  struct NicPair {
    NicPair(std::shared_ptr<Nic> its_nic, size_t its_index, const Options& options,
            uint32_t num_slots);

    std::shared_ptr<Nic> nic;
    size_t index;  // number of our NIC
    CompletionQueue cq;
    QueuePair qp;
    uint32_t room;  // sends that can be posted
    uint32_t peer_rkey = 0;
    uint32_t peer_headers_rkey = 0;
    std::string name;  // "mlx5_0:1 (::ffff:10.0.0.1) to mlx5_1:1 (::ffff:10.0.0.2)"
  };

  // A slot of ours and the peer's that it is sent to.
  struct Slot {
    bool is_posted = false;  // the NIC may read it
    bool is_emptied = true;  // the peer has given a credit
  };

  void OnCompletion(NicPair& pair, const ibv::Wc& wc);
  void OnImmediate(const NicPair& pair, Immediate immediate);
  // The NIC pair with the most room; null: none has room for so many sends.
  NicPair* WithRoom(uint32_t num_sends) const;
  void Fail(const NicPair& pair, std::string_view reason);
  void SetUpNicPair(NicPair& pair, NicPairInfo peer);

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
  std::vector<bool> is_filled_;  // by slot: the peer has filled it, and we have not emptied it
  std::deque<Arrival> arrivals_;
  std::deque<uint8_t> credits_due_;      // slots that we have emptied
  std::array<ibv::Wc, 32> completions_;  // completions of one poll
  Clock::time_point busy_until_;
  bool is_lost_ = false;
};

// Description of a NIC of ours for the peer, but for keys and the queue pair.
NicPairInfo InfoOf(const NicInfo& nic);

}  // namespace jaxhet::verbs

#endif  // XLA_PLUGIN_NET_VERBS_LINK_H_
