#include "xla_plugin/transport/socket.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <utility>

#include "xla_plugin/base/error.h"

namespace jaxhet {
namespace {

msghdr MessageOf(std::span<const iovec> pieces) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(pieces.data());
  message.msg_iovlen = std::min<size_t>(pieces.size(), IOV_MAX);
  return message;
}

}  // namespace

Socket::Socket(Fd fd) : fd_(std::move(fd)) {
  const int flags = fcntl(fd_.get(), F_GETFL);
  if (flags < 0 || fcntl(fd_.get(), F_SETFL, flags | O_NONBLOCK) < 0) ThrowErrno("fcntl(F_SETFL)");
  if (fcntl(fd_.get(), F_SETFD, FD_CLOEXEC) < 0) ThrowErrno("fcntl(F_SETFD)");
}

void Socket::OnEvents(uint32_t events) {
  constexpr uint32_t kBroken = EPOLLHUP | EPOLLERR;
  readable_ |= !closed() && (events & (EPOLLIN | EPOLLRDHUP | kBroken)) != 0;
  writable_ |= !closed() && (events & (EPOLLOUT | kBroken)) != 0;
}

size_t Socket::Moved(ssize_t result, bool& ready, const char* call) {
  if (result > 0) return static_cast<size_t>(result);
  if (result < 0 && errno == EINTR) return 0;
  ready = false;
  if (result < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return 0;
  close_reason_ = result == 0 ? "end of file" : ErrnoText(call, errno);
  readable_ = writable_ = false;
  return 0;
}

size_t Socket::Read(std::span<const iovec> pieces) {
  if (!readable_) return 0;
  msghdr message = MessageOf(pieces);
  return Moved(recvmsg(fd_.get(), &message, 0), readable_, "recvmsg");
}

size_t Socket::Write(std::span<const iovec> pieces) {
  if (!writable_ || closed()) return 0;
  const msghdr message = MessageOf(pieces);
  const ssize_t result = sendmsg(fd_.get(), &message, MSG_NOSIGNAL);
  // A peer that is gone may have left words to read: only reading decides that the end has come.
  if (result < 0 && (errno == EPIPE || errno == ECONNRESET)) {
    writable_ = false;
    return 0;
  }
  return Moved(result, writable_, "sendmsg");
}

void Socket::ShutdownWrite() {
  writable_ = false;
  shutdown(fd_.get(), SHUT_WR);
}

}  // namespace jaxhet
