#include "xla_plugin/transport/device_channel/shared_memory.h"

#include <endian.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
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

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

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

SharedMemory::SharedMemory(size_t num_bytes)
    : fd_(memfd_create("jaxhet", MFD_CLOEXEC | MFD_ALLOW_SEALING)) {
  if (!fd_) ThrowErrno("memfd_create");
  info_ = {.pid = getpid(), .fd = fd_.get(), .num_bytes = num_bytes, .nonce = {}};
  // Reserved now: running out of memory later would be a SIGBUS.
  int error_number = EINTR;
  while (error_number == EINTR) {
    error_number = posix_fallocate(fd_.get(), 0, static_cast<off_t>(kHeaderBytes + num_bytes));
  }
  if (error_number != 0) throw Error(ErrorCode::kTransport, ErrnoText("fallocate", error_number));
  if (fcntl(fd_.get(), F_ADD_SEALS, kSeals) < 0) ThrowErrno("fcntl(F_ADD_SEALS)");
  if (getrandom(&info_.nonce, sizeof info_.nonce, 0) != sizeof info_.nonce) ThrowErrno("getrandom");
  Map();
  std::memcpy(base_, &info_.nonce, sizeof info_.nonce);
}

SharedMemory::SharedMemory(const SharedMemoryInfo& info) : info_(info) {
  const std::string path = StrCat("/proc/", info.pid, "/fd/", info.fd);
  fd_.Reset(open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK));  // a pipe there would block
  if (!fd_) throw Error(ErrorCode::kTransport, ErrnoText(StrCat("open ", path), errno));
  struct stat status{};
  const int seals = fcntl(fd_.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals || fstat(fd_.get(), &status) != 0 ||
      !InBounds(kHeaderBytes, info.num_bytes, static_cast<size_t>(status.st_size))) {
    Throw(ErrorCode::kTransport, path, " is not the peer's memory");
  }
  Map();
  fd_.Reset();
  if (std::memcmp(base_, &info.nonce, sizeof info.nonce) != 0) {
    munmap(base_, kHeaderBytes + info_.num_bytes);
    Throw(ErrorCode::kTransport, path, " belongs to another process (another pid namespace?)");
  }
}

SharedMemory::~SharedMemory() { munmap(base_, kHeaderBytes + info_.num_bytes); }

std::span<std::byte> SharedMemory::pages() const {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return {base_, RoundUp(kHeaderBytes + info_.num_bytes, page)};
}

void SharedMemory::Map() {
  void* const base = mmap(nullptr, kHeaderBytes + info_.num_bytes, PROT_READ | PROT_WRITE,
                          MAP_SHARED, fd_.get(), 0);
  if (base == MAP_FAILED) ThrowErrno("mmap");
  base_ = static_cast<std::byte*>(base);
}

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
