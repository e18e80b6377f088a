#ifndef XLA_PLUGIN_TRANSPORT_VERBS_CONNECTION_H_
#define XLA_PLUGIN_TRANSPORT_VERBS_CONNECTION_H_

#include <cstddef>
#include <deque>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "xla_plugin/transport/transport.h"
#include "xla_plugin/transport/verbs/nics.h"
#include "xla_plugin/transport/verbs/slot_link.h"
#include "xla_plugin/transport/verbs/slot_memory.h"

namespace jaxhet::verbs {

// Between host memories: chunks are copied to slots, and from the slots that they arrive in.
class VerbsConnection final : public Connection {
 public:
  VerbsConnection(Nics& nics, size_t chunk_bytes, ConnectionHost& host);

  std::string Offer() override { return link_.Offer(); }
  void Accept(std::string_view offer) override { link_.Accept(offer); }
  std::vector<Pollable*> Pollables() override { return link_.Pollables(); }
  void Begin(Transfer& transfer, std::string_view announcement) override;
  void OnMessage(std::span<const std::byte> message) override { link_.OnMessage(message); }
  bool Advance() override;

 private:
  size_t Drain();
  bool CanSend();
  size_t Send();
  size_t Fill(size_t slot);
  size_t ChunkBytesOf(size_t num_bytes) const;

  ConnectionHost& host_;
  Staging outgoing_;
  Staging incoming_;
  SlotLink link_;
  std::deque<Transfer*> sends_;
};

}  // namespace jaxhet::verbs

#endif  // XLA_PLUGIN_TRANSPORT_VERBS_CONNECTION_H_
