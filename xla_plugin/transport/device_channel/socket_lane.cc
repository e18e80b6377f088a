#include <algorithm>
#include <limits>

#include "xla_plugin/base/error.h"
#include "xla_plugin/transport/device_channel/tcp_channel.h"

namespace jaxhet {
namespace {

// A slot travels as one chunk.
tcp::TcpSockets SocketsOf(LaneSockets& sockets) {
  return {.control_fd = sockets.messages.get(),
          .data = std::move(sockets.data),
          .keys = std::move(sockets.keys),
          .chunk_bytes = std::numeric_limits<size_t>::max(),
          .path_timeout = sockets.path_timeout};
}

}  // namespace

Transfer& SocketLane::Direction::Find(uint64_t chunk) {
  Throw(ErrorCode::kTransport, "the peer sent chunk ", chunk, " on a channel from here");
}

SocketLane::SocketLane(LaneSockets sockets)
    : log_(std::move(sockets.log)), connection_(SocketsOf(sockets), *this) {
  messages_.emplace(std::move(sockets.messages), std::move(sockets.messages_keys));
}

std::vector<int> SocketLane::fds() {
  std::vector<int> fds;
  for (const Pollable* const pollable : Pollables()) fds.push_back(pollable->fd());
  return fds;
}

void SocketLane::Accept(std::string_view offer) {
  connection_.Accept(offer);
  if (!connection_.confirms()) messages_.reset();
}

std::vector<Pollable*> SocketLane::Pollables() {
  std::vector<Pollable*> pollables = connection_.Pollables();
  if (messages_) pollables.push_back(&messages_->socket());
  return pollables;
}

ProxyTask::State SocketLane::Advance() {
  const std::lock_guard lock(mutex_);
  if (is_over_) return State::kIdle;
  has_moved_ = is_stalled_ = false;
  try {
    if (messages_ && lost_.empty()) {
      while (const auto message = messages_->Receive()) {
        connection_.OnMessage(std::as_bytes(std::span(*message)));
      }
    }
  } catch (const Error& error) {
    lost_ = error.text();
  }
  try {
    const State begun = outgoing_ == nullptr ? State::kIdle : outgoing_->Begin(connection_);
    // Without messages nothing can be confirmed.
    const bool can_move = lost_.empty() || !messages_;
    const bool more = can_move && (connection_.Advance() || is_stalled_ || connection_.IsEnding());
    const bool is_sending = outgoing_ != nullptr && outgoing_->is_sending();
    if (!lost_.empty() && (is_sending || connection_.HasBroken())) {
      Throw(ErrorCode::kTransport, lost_);
    }
    return has_moved_ ? State::kMoved : std::max(begun, more ? State::kWaiting : State::kIdle);
  } catch (const Error& error) {
    is_over_ = true;
    for (Direction* const direction : {outgoing_, incoming_}) {
      if (direction != nullptr) direction->Fail(error);
    }
    return State::kIdle;
  }
}

void SocketLane::SetOutgoing(Direction& direction) {
  const std::lock_guard lock(mutex_);
  outgoing_ = &direction;
}

void SocketLane::SetIncoming(Direction& direction) {
  {
    const std::lock_guard lock(mutex_);
    incoming_ = &direction;
  }
  Wake();  // chunks may have arrived
}

void SocketLane::Stop() {
  const std::lock_guard lock(mutex_);
  is_over_ = true;
}

bool SocketLane::IsReady(uint64_t ticket) {
  const bool is_ready = incoming_ != nullptr && incoming_->IsReady(ticket);
  is_stalled_ |= !is_ready;
  return is_ready;
}

void SocketLane::Sent(Transfer& transfer, size_t num_bytes) {
  transfer.sent += num_bytes;
  has_moved_ = true;
  outgoing_->Moved(transfer);
}

void SocketLane::Received(Transfer& transfer, size_t num_bytes) {
  transfer.received += num_bytes;
  has_moved_ = true;
  incoming_->Moved(transfer);
}

}  // namespace jaxhet
