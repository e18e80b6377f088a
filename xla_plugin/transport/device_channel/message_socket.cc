#include "xla_plugin/transport/device_channel/message_socket.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>

#include "xla_plugin/base/error.h"

namespace jaxhet {
namespace {

constexpr uint32_t kMostBytes = 1 << 20;

}  // namespace

MessageSocket::MessageSocket(const Fd& socket) : fd_(fcntl(socket.get(), F_DUPFD_CLOEXEC, 0)) {
  if (!fd_) ThrowErrno("fcntl");
}

void MessageSocket::Send(std::span<const iovec> message) const {
  std::string bytes(sizeof(uint32_t), '\0');
  for (const iovec& entry : message) {
    bytes.append(static_cast<const char*>(entry.iov_base), entry.iov_len);
  }
  const auto num_bytes = static_cast<uint32_t>(bytes.size() - sizeof(uint32_t));
  std::memcpy(bytes.data(), &num_bytes, sizeof num_bytes);
  for (size_t sent = 0; sent < bytes.size();) {
    const ssize_t done = send(fd(), &bytes[sent], bytes.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (done < 0 && errno != EINTR) ThrowErrno("send");
    sent += static_cast<size_t>(std::max<ssize_t>(done, 0));
  }
}

std::optional<std::string> MessageSocket::Receive() {
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
    if (!is_readable_) return std::nullopt;
    std::array<char, 4096> buffer{};
    const ssize_t done = recv(fd(), buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      is_readable_ = false;
      continue;
    }
    if (done < 0) ThrowErrno("recv");
    if (done == 0) Throw(ErrorCode::kTransport, "the peer has closed the connection");
    received_.append(buffer.data(), static_cast<size_t>(done));
  }
}

}  // namespace jaxhet
