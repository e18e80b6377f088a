#include "xla_plugin/engine/control/peer.h"

#include <array>

#include "xla_plugin/base/checked.h"

namespace jaxhet {

void Peer::Log(std::string_view what) {
  ++path_failures;
  events_.PathChanged(*this, what);
}

void Peer::SayFailure(const Error& error, int own_process) {
  const int failed_process = error.failed_process() >= 0 ? error.failed_process() : own_process;
  const FailInfo info{error.code(), failed_process};
  channel.Send(MessageType::kFail,
               std::array{ObjectIovec(info), ToIovec(error.text().data(), error.text().size())});
  channel.FinishSending();
}

std::set<Pollable*> Peer::Pollables() {
  std::set<Pollable*> pollables;
  if (Pollable* const control = channel.socket()) pollables.insert(control);
  if (!connection) return pollables;
  for (Pollable* const pollable : connection->Pollables()) pollables.insert(pollable);
  return pollables;
}

void Peer::Sent(Transfer& transfer, size_t num_bytes) {
  transfer.sent += num_bytes;
  bytes_sent += num_bytes;
  events_.Moved(*this, transfer);
}

void Peer::Received(Transfer& transfer, size_t num_bytes) {
  if (!InBounds(transfer.received, num_bytes, transfer.receive.num_bytes())) {
    Throw(ErrorCode::kTransport, kBytesTwice);
  }
  transfer.received += num_bytes;
  bytes_received += num_bytes;
  events_.Moved(*this, transfer);
}

}  // namespace jaxhet
