#include "xla_plugin/transport/device_channel/fd_mailbox.h"

#include <endian.h>
#include <linux/filter.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <vector>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"

namespace jaxhet {
namespace {

using Nonce = decltype(FdMailboxInfo::nonce);

// A message with room for what comes beside it.
struct Letter {
  Nonce nonce{};
  iovec body{.iov_base = &nonce, .iov_len = sizeof nonce};
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(sizeof(int))> beside{};
  msghdr header{.msg_name = nullptr,
                .msg_namelen = 0,
                .msg_iov = &body,
                .msg_iovlen = 1,
                .msg_control = beside.data(),
                .msg_controllen = beside.size(),
                .msg_flags = 0};

  Letter() = default;
  Letter(const Letter&) = delete;
  Letter& operator=(const Letter&) = delete;
};

Fd UnixSocket() {
  Fd socket(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) ThrowErrno("socket(AF_UNIX)");
  return socket;
}

// Instructions of a socket filter that drop the message unless `load` gives `value`.
void AppendCheck(uint16_t load, size_t offset, uint32_t value, std::vector<sock_filter>& code) {
  code.push_back({.code = load, .jt = 0, .jf = 0, .k = CheckedCast<uint32_t>(offset)});
  code.push_back({.code = BPF_JMP | BPF_JEQ | BPF_K, .jt = 1, .jf = 0, .k = value});
  code.push_back({.code = BPF_RET | BPF_K, .jt = 0, .jf = 0, .k = 0});
}

// Has the kernel drop every message without the nonce while its sender sends it, so that it takes
// no place in the queue and its descriptors are closed. socket(7), SO_ATTACH_FILTER.
void QueueOnly(const Nonce& nonce, const Fd& socket) {
  std::array<uint32_t, sizeof nonce / sizeof(uint32_t)> words{};
  std::memcpy(words.data(), &nonce, sizeof nonce);
  std::vector<sock_filter> code;
  AppendCheck(BPF_LD | BPF_W | BPF_LEN, 0, sizeof nonce, code);
  for (size_t i = 0; i < words.size(); ++i) {
    AppendCheck(BPF_LD | BPF_W | BPF_ABS, i * sizeof(uint32_t), be32toh(words[i]), code);
  }
  code.push_back({.code = BPF_RET | BPF_K, .jt = 0, .jf = 0, .k = sizeof nonce});
  const sock_fprog program{.len = CheckedCast<uint16_t>(code.size()), .filter = code.data()};
  if (setsockopt(socket.get(), SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program) != 0) {
    ThrowErrno("setsockopt(SO_ATTACH_FILTER)");
  }
}

// All descriptors in a message's control part are ours to close, whoever sent it.
std::vector<Fd> TakeFds(msghdr& header) {
  std::vector<Fd> fds;
  for (cmsghdr* c = CMSG_FIRSTHDR(&header); c != nullptr; c = CMSG_NXTHDR(&header, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int number = -1;
      std::memcpy(&number, CMSG_DATA(c) + i * sizeof number, sizeof number);
      fds.emplace_back(number);
    }
  }
  return fds;
}

}  // namespace

FdMailbox::FdMailbox() : socket_(UnixSocket()) {
  if (getrandom(&info_.nonce, sizeof info_.nonce, 0) != sizeof info_.nonce) ThrowErrno("getrandom");
  QueueOnly(info_.nonce, socket_);  // before it has a name that strangers can send to
  sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
  socklen_t length = sizeof(sa_family_t);  // without a name: Linux gives one
  if (bind(socket_.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    ThrowErrno("bind(AF_UNIX)");
  }
  length = sizeof address;
  if (getsockname(socket_.get(), reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    ThrowErrno("getsockname");
  }
  const size_t size = length - offsetof(sockaddr_un, sun_path);
  if (size == 0 || size >= info_.name.size()) {
    Throw(ErrorCode::kTransport, "Linux gave a socket a name of ", size, " bytes");
  }
  std::memcpy(info_.name.data(), &address.sun_path[1], size - 1);
}

Fd FdMailbox::Take() {
  while (true) {
    Letter message;
    if (recvmsg(socket_.get(), &message.header, MSG_CMSG_CLOEXEC) < 0) {
      if (errno == EINTR) continue;
      ThrowErrno("recvmsg: no file descriptor from the peer");
    }
    std::vector<Fd> fds = TakeFds(message.header);
    if (fds.size() == 1) return std::move(fds.front());
  }
}

void LeaveFd(const FdMailboxInfo& mailbox, const Fd& fd) {
  sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
  const size_t size = strnlen(mailbox.name.data(), mailbox.name.size());
  std::memcpy(&address.sun_path[1], mailbox.name.data(), size);
  Letter message;
  message.nonce = mailbox.nonce;
  message.header.msg_name = &address;
  message.header.msg_namelen = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + size);
  cmsghdr* const beside = CMSG_FIRSTHDR(&message.header);
  beside->cmsg_level = SOL_SOCKET;
  beside->cmsg_type = SCM_RIGHTS;
  beside->cmsg_len = CMSG_LEN(sizeof(int));
  const int number = fd.get();
  std::memcpy(CMSG_DATA(beside), &number, sizeof number);
  if (sendmsg(UnixSocket().get(), &message.header, MSG_NOSIGNAL) < 0) {
    ThrowErrno("sendmsg: the peer's mailbox for file descriptors");
  }
}

}  // namespace jaxhet
