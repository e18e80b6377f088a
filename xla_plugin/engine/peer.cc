#include "xla_plugin/engine/peer.h"

#include <array>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/engine/progress_engine.h"

namespace jaxhet {

void Peer::Log(std::string_view what) {
  ++path_failures;
  if (progress_.least_severity_ > Severity::kWarning) return;
  LogLine(StrCat("jaxhet: [", progress_.roster_.OwnName(), "] ",
                 progress_.roster_.ProcessName(process), ": ", what));
}

void Peer::SayFailure(const Error& error, int own_process) {
  const int failed_process = error.failed_process() >= 0 ? error.failed_process() : own_process;
  const FailInfo info{error.code(), failed_process};
  channel.Send(MessageType::kFail,
               std::array{ObjectIovec(info), ToIovec(error.text().data(), error.text().size())});
  channel.FinishSending();
}

Transfer& Peer::Find(uint64_t ticket) {
  const auto found = progress_.transfers_.find(ticket);
  if (found == progress_.transfers_.end() || &progress_.PeerOf(found->second->peer_rank) != this) {
    Throw(ErrorCode::kTransport, "it names the transfer ", ticket, ", which is not open");
  }
  return *found->second;
}

void Peer::Sent(Transfer& transfer, size_t num_bytes) {
  transfer.sent += num_bytes;
  bytes_sent += num_bytes;
  progress_.CloseIfDone(static_cast<PeerTransfer&>(transfer));
}

void Peer::Received(Transfer& transfer, size_t num_bytes) {
  if (!InBounds(transfer.received, num_bytes, transfer.receive.num_bytes())) {
    Throw(ErrorCode::kTransport, kBytesTwice);
  }
  transfer.received += num_bytes;
  bytes_received += num_bytes;
  progress_.CloseIfDone(static_cast<PeerTransfer&>(transfer));
}

}  // namespace jaxhet
