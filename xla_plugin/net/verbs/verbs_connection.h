#ifndef XLA_PLUGIN_NET_VERBS_VERBS_CONNECTION_H_
#define XLA_PLUGIN_NET_VERBS_VERBS_CONNECTION_H_

#include <array>
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
#include "xla_plugin/net/verbs/link.h"
#include "xla_plugin/net/verbs/memory.h"
#include "xla_plugin/net/verbs/nics.h"

namespace jaxhet::verbs {

// Over InfiniBand or RoCE: NICs write slots of ours into the same slots of the peer's, which gives
// them back when it has emptied them. Slots are used in turns.
//
// Without slots of the owner's, transfers lie anywhere in host memory. Their chunks are copied into
// slots, and out of those that they arrive in.
//
// With them, transfers lie in the slots, for one direction: transfer n is a description in host
// memory, of ChunkInfo::description's size, and then bytes in slot n % `count`. It is sent once the
// peer has emptied the slot, and we have emptied it once transfer n + `count` is ready.
class VerbsConnection final : public Connection {
 public:
  VerbsConnection(Nics& nics, size_t chunk_bytes, ConnectionHost& host);
  enum class Direction { kOut, kIn };
  VerbsConnection(NicList nics, const Options& options, std::shared_ptr<DeviceSlots> slots,
                  size_t count, Direction direction, ConnectionHost& host);

  std::string Offer() override { return link_.Offer(); }
  void Accept(std::string_view offer) override { link_.Accept(offer); }
  std::vector<Pollable*> Pollables() override { return link_.Pollables(); }
  void Begin(Transfer& transfer, std::string_view announcement) override;
  void OnMessage(std::span<const std::byte> message) override;
  bool Advance() override;
  bool HasBroken() const override { return link_.is_lost(); }
  void Kill() override { link_.Kill(); }

  // Set-up, with slots of the owner's. Sends the first bytes of slot 0, and throws TransportError
  // if the NIC does not confirm them in time.
  void SendProof(size_t num_bytes);
  // Whether the proof has arrived in time, for the device that owns the slots to see.
  bool AwaitProof();
  // The proof was looked at.
  void TakeProof() { link_.Empty(0); }

 private:
  VerbsConnection(Nics& nics, size_t count, size_t chunk_bytes, ConnectionHost& host);

  size_t Drain();
  bool CanDrain(const Link::Arrival& arrival, uint64_t ticket);
  void Reserve(Transfer& transfer, const ChunkInfo& info) const;
  size_t GiveBack();
  bool CanSend() const;
  size_t Send();
  size_t ChunkBytesOf(size_t num_bytes) const;
  size_t NextSlot() const;

  ConnectionHost& host_;
  const std::shared_ptr<DeviceSlots> slots_;  // the owner's
  std::unique_ptr<Staging> outgoing_;         // or else these
  std::unique_ptr<Staging> incoming_;
  Link link_;
  std::deque<Transfer*> sends_;
  uint64_t num_sent_ = 0;  // chunks
  // By slot of the owner's:
  std::vector<Transfer*> sent_;                   // the peer has not emptied it
  std::vector<std::optional<uint64_t>> arrived_;  // ticket; we have not emptied it
};

}  // namespace jaxhet::verbs

#endif  // XLA_PLUGIN_NET_VERBS_VERBS_CONNECTION_H_
