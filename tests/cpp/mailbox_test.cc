#include <dirent.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <array>
#include <cstddef>
#include <cstring>
#include <string>

#include "tests/cpp/testing.h"
#include "xla_plugin/transport/ring/fd_mailbox.h"

// Strangers of the same host who have found a mailbox's name (/proc/net/unix).
namespace jaxhet::testing {
namespace {

size_t CountFds() {
  DIR* const directory = opendir("/proc/self/fd");
  size_t count = 0;
  while (readdir(directory) != nullptr) ++count;
  closedir(directory);
  return count;
}

// Sends `count` copies of standard output, without the nonce. False if it does not fit.
bool Intrude(const FdMailboxInfo& mailbox, size_t count) {
  const Fd socket(::socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
  const size_t size = strnlen(mailbox.name.data(), mailbox.name.size());
  std::memcpy(&address.sun_path[1], mailbox.name.data(), size);
  std::array<uint64_t, 2> junk{1, 2};
  iovec body{.iov_base = &junk, .iov_len = sizeof junk};
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(8 * sizeof(int))> beside{};
  msghdr message{};
  message.msg_name = &address;
  message.msg_namelen = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + size);
  message.msg_iov = &body;
  message.msg_iovlen = 1;
  message.msg_control = beside.data();
  message.msg_controllen = CMSG_SPACE(count * sizeof(int));
  cmsghdr* const header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(count * sizeof(int));
  const int fd = STDOUT_FILENO;
  for (size_t i = 0; i < count; ++i) {
    std::memcpy(CMSG_DATA(header) + i * sizeof fd, &fd, sizeof fd);
  }
  return sendmsg(socket.get(), &message, MSG_NOSIGNAL) >= 0;
}

TEST(ClosesAllDescriptorsOfStrangers) {
  FdMailbox mailbox;
  const Fd own(dup(STDOUT_FILENO));
  const size_t before = CountFds();
  for (size_t count = 1; count <= 5; ++count) EXPECT(Intrude(mailbox.info(), count));
  LeaveFd(mailbox.info(), own);
  {
    const Fd taken = mailbox.Take();
  }
  ExpectEqual(CountFds(), before);
}

TEST(TakesNothingFromStrangers) {
  FdMailbox mailbox;
  EXPECT(Intrude(mailbox.info(), 1));
  ExpectContains(ExpectThrow([&] { mailbox.Take(); }), "no file descriptor from the peer");
}

}  // namespace
}  // namespace jaxhet::testing
