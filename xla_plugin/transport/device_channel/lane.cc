#include "xla_plugin/transport/device_channel/lane.h"

#include <algorithm>
#include <utility>

#include "xla_plugin/base/error.h"

namespace jaxhet {

Transfer& Lane::Direction::Find(uint64_t chunk) {
  Throw(ErrorCode::kTransport, "the peer sent chunk ", chunk, " on a channel from here");
}

Lane::Lane(std::optional<Messages> messages, LogFunction log, const Open& open)
    : log_(std::move(log)) {
  if (messages) messages_.emplace(std::move(messages->fd), std::move(messages->keys));
  connection_ = open(*this);
}

void Lane::Accept(std::string_view offer) {
  connection_->Accept(offer);
  if (!connection_->HasMessages()) messages_.reset();
}

std::vector<Pollable*> Lane::Pollables() {
  std::vector<Pollable*> pollables = connection_->Pollables();
  if (messages_) pollables.push_back(messages_->socket());
  return pollables;
}

void Lane::TakeMessages() {
  if (!messages_ || !lost_.empty()) return;
  try {
    messages_->Flush();
    while (const auto message = messages_->Next()) {
      if (message->type != kMessage) {
        Throw(ErrorCode::kTransport, "the peer sent another message than the lane's");
      }
      connection_->OnMessage(std::as_bytes(std::span(message->body)));
    }
    const std::string& failure = messages_->socket()->send_failure();
    if (!failure.empty()) lost_ = StrCat("a lane's connection for messages: ", failure);
  } catch (const Error& error) {
    lost_ = error.text();
  }
}

Lane::State Lane::Advance() {
  const std::lock_guard lock(mutex_);
  if (is_over_) return State::kIdle;
  has_moved_ = is_stalled_ = false;
  TakeMessages();
  try {
    const State begun = outgoing_ == nullptr ? State::kIdle : outgoing_->Begin(*connection_);
    // Without messages nothing can be confirmed.
    const bool can_move = lost_.empty() || !messages_;
    const bool more = can_move && (connection_->Advance() || is_stalled_);
    const bool is_sending = outgoing_ != nullptr && outgoing_->is_sending();
    if (!lost_.empty() && (is_sending || connection_->HasBroken())) {
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

void Lane::SetOutgoing(Direction& direction) {
  const std::lock_guard lock(mutex_);
  outgoing_ = &direction;
}

void Lane::SetIncoming(Direction& direction) {
  {
    const std::lock_guard lock(mutex_);
    incoming_ = &direction;
  }
  Wake();  // chunks may have arrived
}

void Lane::Stop() {
  const std::lock_guard lock(mutex_);
  is_over_ = true;
  connection_->Kill();
}

bool Lane::IsReady(uint64_t ticket) {
  const bool is_ready = incoming_ != nullptr && incoming_->IsReady(ticket);
  is_stalled_ |= !is_ready;
  return is_ready;
}

void Lane::Sent(Transfer& transfer, size_t num_bytes) {
  transfer.sent += num_bytes;
  has_moved_ = true;
  outgoing_->Moved(transfer);
}

void Lane::Received(Transfer& transfer, size_t num_bytes) {
  transfer.received += num_bytes;
  has_moved_ = true;
  incoming_->Moved(transfer);
}

}  // namespace jaxhet
