#ifndef XLA_PLUGIN_NET_VERBS_VERBS_CONNECTION_H_
#define XLA_PLUGIN_NET_VERBS_VERBS_CONNECTION_H_

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

#include "xla_plugin/net/connection.h"
#include "xla_plugin/net/verbs/device.h"
#include "xla_plugin/net/verbs/memory.h"
#include "xla_plugin/net/verbs/nics.h"
#include "xla_plugin/net/verbs/wire.h"

namespace jaxhet::verbs {

// Over InfiniBand or RoCE: NICs write slots of ours, each with its header, into the same slots of
// the peer's, which gives them back when it has emptied them. Slots are used in turns.
//
// Without slots of the owner's, transfers lie anywhere in host memory. Their chunks are copied into
// slots, and out of those that they arrive in.
//
// With them, transfers lie in the slots, for one direction: transfer n is a description in host
// memory, of ChunkInfo::description's size, and then bytes in slot n % `count`. It is sent once the
// peer has emptied the slot, and we have emptied it once transfer n + `count` is ready.
//
// A NIC pair joins a NIC of ours with one of the peer's by a queue pair for chunks and credits.
// With `Options::qps` of them for each NIC, a network can use several paths. A slot is sent over
// the NIC pair that has the most room. If a queue pair fails, the peer is lost.
class VerbsConnection final : public Connection {
 public:
  VerbsConnection(Nics& nics, size_t chunk_bytes, ConnectionHost& host);
  enum class Direction { kOut, kIn };
  VerbsConnection(NicList nics, const Options& options, const std::shared_ptr<DeviceSlots>& slots,
                  size_t count, Direction direction, ConnectionHost& host);

  std::string Offer() override;
  void Accept(std::string_view offer) override;
  std::vector<Pollable*> Pollables() override;
  void Begin(Transfer& transfer, std::string_view announcement) override;
  void OnMessage(std::span<const std::byte> message) override;
  bool Advance() override;
  bool HasBroken() const override { return is_lost_; }
  // Stops all queue pairs: NICs no longer read or write our memory.
  void Kill() override;

  // Set-up, with slots of the owner's. Sends the first bytes of slot 0, and throws TransportError
  // if the NIC does not confirm them in time.
  void SendProof(size_t num_bytes);
  // Whether the proof has arrived in time, for the device that owns the slots to see.
  bool AwaitProof();
  // The proof was looked at.
  void TakeProof() { Empty(0); }

 private:
  using Clock = std::chrono::steady_clock;

  static constexpr uint32_t kSendsPerChunk = 2;  // header and bytes

  struct Memory {
    std::shared_ptr<DeviceSlots> device;  // the owner's
    std::unique_ptr<Staging> out;         // or else these
    std::unique_ptr<Staging> in;
    SlotMemory outgoing;  // without memory: this end sends nothing
    SlotMemory incoming;  // without memory: this end receives nothing
    size_t count;
    size_t chunk_bytes;  // bytes of a slot that may be sent
  };

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

  struct Slot {
    bool is_posted = false;  // the NIC may read ours
    bool is_emptied = true;  // the peer has given a credit for its own
    bool is_filled = false;  // the peer has filled ours, and we have not emptied it
    // With slots of the owner's:
    Transfer* sent = nullptr;         // the peer has not emptied it
    std::optional<uint64_t> arrived;  // ticket; the device has not emptied it
  };

  struct Arrival {
    size_t slot;
    size_t nic;  // number of our NIC
  };

  VerbsConnection(NicList nics, Options options, Memory memory, ConnectionHost& host);
  static Memory MakeStaging(Nics& nics, size_t chunk_bytes);
  void SetUpNicPair(NicPair& pair, NicPairInfo peer);

  // Handles all completions that have arrived.
  void Poll();
  template <typename IsOver>
  bool PollUntil(IsOver is_over);
  void OnCompletion(NicPair& pair, const ibv::Wc& wc);
  void OnImmediate(const NicPair& pair, Immediate immediate);
  void Fail(const NicPair& pair, std::string_view reason);
  // Poll() found completions a moment ago, and will probably find more.
  bool IsBusy() const { return Clock::now() < busy_until_; }
  // The NIC pair with the most room; null: none has room for so many sends.
  NicPair* WithRoom(uint32_t num_sends);

  size_t NextSlot() const { return num_sent_ % slots_.size(); }
  // The peer has emptied the slot and the NIC no longer reads it.
  static bool IsFree(const Slot& slot) { return !slot.is_posted && slot.is_emptied; }
  bool CanSend();
  size_t Send();
  size_t ChunkBytesOf(size_t num_bytes) const;
  // Sends the header and `num_bytes` of a slot that can be sent.
  void Post(size_t index, size_t num_bytes);

  size_t Drain();
  size_t GiveBack();
  // Gives the slot of an arrival that was taken back to the peer, by a credit.
  void Empty(size_t slot);
  // Sends credits, as far as there is room.
  void SendCredits();

  const Options options_;
  ConnectionHost& host_;
  Memory memory_;
  Staging headers_;
  Staging arrived_headers_;
  size_t peer_slot_bytes_ = 0;
  uint64_t peer_slots_address_ = 0;
  uint64_t peer_headers_address_ = 0;
  std::deque<NicPair> nic_pairs_;

  std::vector<Slot> slots_;
  std::deque<Transfer*> sends_;
  uint64_t num_sent_ = 0;  // chunks
  std::deque<Arrival> arrivals_;
  std::deque<uint8_t> credits_due_;      // slots that we have emptied
  std::array<ibv::Wc, 32> completions_;  // completions of one poll
  Clock::time_point busy_until_;
  bool is_lost_ = false;
};

}  // namespace jaxhet::verbs

#endif  // XLA_PLUGIN_NET_VERBS_VERBS_CONNECTION_H_
