#ifndef XLA_PLUGIN_TRANSPORT_VERBS_CONNECTION_H_
#define XLA_PLUGIN_TRANSPORT_VERBS_CONNECTION_H_

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
#include "xla_plugin/transport/verbs/path.h"
#include "xla_plugin/transport/verbs/staging.h"
#include "xla_plugin/transport/verbs/wire.h"

namespace jaxhet::verbs {

// A rail joins our NIC i with the peer's NIC i by several paths; the first of them is for credits,
// which would wait behind chunks on the others. Every chunk goes over one path, whichever has the
// least to do, into the slot of the peer's memory that corresponds to the one it was copied to.
//
// When a path fails, each end kills its queue pair and says so, with the credits that may have been
// lost, over the control connection. Once both have, no late packet can reach the slots, and the
// path's chunks are sent again, over others or over a new queue pair. A chunk that had arrived
// all the same is known by the sequence of its slot.
class VerbsConnection final : public Connection {
 public:
  VerbsConnection(Nics& nics, size_t chunk_bytes, ConnectionHost& host);
  ~VerbsConnection() override;

  std::string Offer() override;
  void Accept(std::string_view offer) override;
  std::vector<Pollable*> Pollables() override;
  void Begin(Transfer& transfer, std::string_view announcement) override;
  void OnMessage(std::span<const std::byte> message) override;
  bool Advance() override;

 private:
  using Clock = std::chrono::steady_clock;

  struct Rail {
    Rail(std::shared_ptr<Nic> its_nic, int num_entries, const Staging& outgoing,
         const Staging& incoming);

    std::shared_ptr<Nic> nic;
    CompletionQueue cq;
    MemoryRegion outgoing;
    MemoryRegion incoming;
    std::deque<Path> paths;
    uint32_t peer_rkey = 0;
    std::string name;          // "mlx5_0:1 (::ffff:10.0.0.1) to mlx5_1:1 (::ffff:10.0.0.2)"
    std::string seen_problem;  // of the NIC
  };

  // A slot of ours and the peer's that it is sent to.
  struct Slot {
    uint16_t sequence = 0;   // of its uses
    uint32_t num_bytes = 0;  // with the header
    Path* path = nullptr;    // that it was posted to last
    bool is_posted = false;  // the NIC may read it
    bool is_emptied = true;  // by the peer
    bool IsFree() const { return !is_posted && is_emptied; }
  };

  // A slot of the peer's, in our memory.
  struct PeerSlot {
    uint16_t filled = 0;   // the sequence that it was last filled with
    uint16_t emptied = 0;  // the one that we last copied out
  };

  // connection.cc: chunks and credits
  void Poll();
  void OnCompletion(Rail& rail, const ibv::Wc& wc);
  void OnImmediate(Immediate immediate);
  void OnCredit(size_t index, uint16_t sequence);
  void FreeIfDone(size_t index);
  bool Arm();
  size_t Drain();
  size_t Send();
  size_t Fill(Rail& rail, Path& path);
  void PostFrom(Rail& rail, Path& path, size_t index, size_t begin, size_t end);
  void SendCredits();
  bool CanSend();
  size_t PieceBytes(size_t num_bytes) const;
  struct Choice {
    Rail* rail = nullptr;
    Path* path = nullptr;
  };
  Choice ChoosePath(bool for_credits, uint32_t num_sends);

  // paths.cc: set-up and failure
  void SetUpRail(Rail& rail, const OfferInfo& offer, size_t index, std::string_view& rest);
  void LookAtNics();
  void ClosePath(Rail& rail, Path& path, std::string_view reason);
  void OnPeerClosed(Rail& rail, Path& path, const PathEventInfo& info, std::string_view rest);
  void Reopen(Rail& rail, Path& path);
  void SendEvent(PathEvent event, const Path& path, PathInfo replacement, std::string_view rest);
  size_t NumLivePaths() const;
  Choice PathOf(uint32_t index);

  Options options_;
  ConnectionHost& host_;
  size_t chunk_bytes_;
  size_t peer_slot_bytes_ = 0;
  uint64_t peer_slots_address_ = 0;
  Staging outgoing_;
  Staging incoming_;
  std::deque<Rail> rails_;

  std::vector<Slot> slots_;
  std::vector<PeerSlot> peer_slots_;
  std::vector<size_t> free_;
  std::deque<size_t> resends_;
  std::deque<size_t> filled_;       // slots of the peer's to copy out
  std::deque<size_t> credits_due_;  // slots of the peer's that we have emptied
  std::deque<Transfer*> sends_;
  Clock::time_point last_completion_;
  std::string last_failure_;  // of a path
};

}  // namespace jaxhet::verbs

#endif  // XLA_PLUGIN_TRANSPORT_VERBS_CONNECTION_H_
