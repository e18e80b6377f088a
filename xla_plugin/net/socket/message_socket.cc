#include "xla_plugin/net/socket/message_socket.h"

#include <array>
#include <cstdint>
#include <cstring>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"

namespace jaxhet {
namespace {

constexpr uint32_t kMostBytes = 1 << 20;

}  // namespace

void MessageSocket::Send(std::span<const iovec> message) {
  const auto num_bytes = CheckedCast<uint32_t>(NumBytes(message));
  unsent_.append(reinterpret_cast<const char*>(&num_bytes), sizeof num_bytes);
  for (const iovec& entry : message) {
    unsent_.append(static_cast<const char*>(entry.iov_base), entry.iov_len);
  }
  SendRest();
}

void MessageSocket::SendRest() {
  const iovec rest = ToIovec(unsent_.data(), unsent_.size());
  unsent_.erase(0, unsent_.empty() ? 0 : socket_.Write({&rest, 1}));
  socket_.Flush();
  if (!socket_.send_failure().empty()) Throw(ErrorCode::kTransport, socket_.send_failure());
}

std::optional<std::string> MessageSocket::Receive() {
  SendRest();
  uint32_t num_bytes = 0;
  while (true) {
    if (received_.size() >= sizeof num_bytes) {
      std::memcpy(&num_bytes, received_.data(), sizeof num_bytes);
      if (num_bytes > kMostBytes) Throw(ErrorCode::kTransport, "the peer's message is too long");
      const size_t end = sizeof num_bytes + num_bytes;
      if (received_.size() >= end) {
        std::string message = received_.substr(sizeof num_bytes, num_bytes);
        received_.erase(0, end);
        return message;
      }
    }
    std::array<char, 4096> buffer{};
    const iovec room = ToIovec(buffer.data(), buffer.size());
    const size_t count = socket_.Read({&room, 1});
    received_.append(buffer.data(), count);
    if (count > 0) continue;
    if (socket_.closed()) Throw(ErrorCode::kTransport, "the peer has closed the connection");
    if (!socket_.readable()) return std::nullopt;
  }
}

}  // namespace jaxhet
