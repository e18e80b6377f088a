#include "xla_plugin/net/socket/control_channel.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"

namespace jaxhet {
namespace {

constexpr size_t kReadBytes = size_t{64} << 10;

void AppendFrom(std::string& text, std::span<const iovec> entries, size_t offset) {
  for (const iovec& entry : entries) {
    const std::string_view bytes(static_cast<const char*>(entry.iov_base), entry.iov_len);
    text += bytes.substr(std::min(offset, bytes.size()));
    offset -= std::min(offset, bytes.size());
  }
}

}  // namespace

void ControlChannel::Send(uint32_t type, std::span<const iovec> body) {
  if (finished_) return;
  const MessageInfo info{kMessageMagic, type, NumBytes(body)};
  if (info.body_bytes > kMaxBodyBytes) {
    Throw(ErrorCode::kUsage, "a message of ", info.body_bytes, " bytes is longer than allowed");
  }
  std::vector<iovec> entries = {ObjectIovec(info)};
  entries.insert(entries.end(), body.begin(), body.end());
  const size_t sent = socket_ && unsent_.empty() ? socket_->Write(entries) : 0;
  AppendFrom(unsent_, entries, sent);
}

void ControlChannel::Send(uint32_t type, std::string_view body) {
  const iovec entry = ToIovec(body.data(), body.size());
  Send(type, {&entry, 1});
}

void ControlChannel::Flush() {
  if (socket_) socket_->Flush();
  if (!socket_ || unsent_.empty()) return;
  const iovec entry = ToIovec(unsent_.data(), unsent_.size());
  unsent_.erase(0, socket_->Write({&entry, 1}));
  if (unsent_.empty() && finished_) socket_->ShutdownWrite();
}

void ControlChannel::FinishSending() {
  if (std::exchange(finished_, true)) return;
  if (socket_ && unsent_.empty()) socket_->ShutdownWrite();
}

std::optional<Message> ControlChannel::Next() {
  std::optional<Message> message = Parse();
  while (!message && ReadMore()) message = Parse();
  return message;
}

std::optional<Message> ControlChannel::Parse() {
  std::string_view rest = std::string_view(received_).substr(parsed_);
  if (rest.size() < sizeof(MessageInfo)) return std::nullopt;
  const auto info = Take<MessageInfo>(rest, "a message");
  if (info.magic != kMessageMagic || info.body_bytes > kMaxBodyBytes) {
    Throw(ErrorCode::kTransport, "what arrived is not a message of this version of jaxhet");
  }
  if (rest.size() < info.body_bytes) return std::nullopt;
  parsed_ += sizeof info + info.body_bytes;
  return Message{info.type, rest.substr(0, info.body_bytes)};
}

bool ControlChannel::ReadMore() {
  received_.erase(0, std::exchange(parsed_, 0));
  if (!socket_) {
    received_ += unsent_;
    return !std::exchange(unsent_, {}).empty();
  }
  if (!socket_->readable()) return false;
  std::array<char, kReadBytes> buffer;  // NOLINT(cppcoreguidelines-pro-type-member-init): 64 KiB
  const iovec entry = ToIovec(buffer.data(), buffer.size());
  const size_t num_bytes = socket_->Read({&entry, 1});
  received_.append(buffer.data(), num_bytes);
  return num_bytes > 0;
}

}  // namespace jaxhet
