#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstring>
#include <span>

#include "tests/cpp/testing.h"
#include "xla_plugin/base/io_list.h"
#include "xla_plugin/transport/device_channel/fd_mailbox.h"

// Strangers of the same host who have found a mailbox's name (/proc/net/unix).
namespace jaxhet::testing {
namespace {

using ::testing::HasSubstr;

struct Pipe {
  Pipe() {
    std::array<int, 2> ends{};
    EXPECT_EQ(pipe2(ends.data(), O_CLOEXEC), 0);
    read = Fd(ends[0]);
    write = Fd(ends[1]);
  }
  Fd read;
  Fd write;
};

// Whether nobody holds a descriptor of the end that writes.
bool HasEnded(const Pipe& pipe) {
  pollfd polled{.fd = pipe.read.get(), .events = POLLIN, .revents = 0};
  return poll(&polled, 1, 0) == 1 && (polled.revents & POLLHUP) != 0;
}

using Nonce = decltype(FdMailboxInfo::nonce);
constexpr Nonce kJunk{1, 2};

// Sends `count` copies of a descriptor after `body`. False if it does not fit.
bool Intrude(const FdMailboxInfo& mailbox, std::span<const uint64_t> body, size_t count,
             const Fd& fd) {
  const Fd socket(::socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
  const size_t size = strnlen(mailbox.name.data(), mailbox.name.size());
  std::memcpy(&address.sun_path[1], mailbox.name.data(), size);
  iovec bytes = ToIovec(body.data(), body.size_bytes());
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(8 * sizeof(int))> beside{};
  msghdr message{};
  message.msg_name = &address;
  message.msg_namelen = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + size);
  message.msg_iov = &bytes;
  message.msg_iovlen = 1;
  message.msg_control = beside.data();
  message.msg_controllen = CMSG_SPACE(count * sizeof(int));
  cmsghdr* const header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(count * sizeof(int));
  const int number = fd.get();
  for (size_t i = 0; i < count; ++i) {
    std::memcpy(CMSG_DATA(header) + i * sizeof number, &number, sizeof number);
  }
  return sendmsg(socket.get(), &message, MSG_NOSIGNAL) >= 0;
}

TEST(MailboxTest, StrangersDoNotFillTheQueue) {
  FdMailbox mailbox;
  const Pipe theirs;
  for (int i = 0; i < 5'000; ++i) EXPECT_TRUE(Intrude(mailbox.info(), kJunk, 1, theirs.write));
  Pipe own;
  LeaveFd(mailbox.info(), own.write);
  own.write.Reset();
  EXPECT_FALSE(HasEnded(own));
  mailbox.Take();  // closes it
  EXPECT_TRUE(HasEnded(own));
}

TEST(MailboxTest, DescriptorsOfStrangersAreNotKept) {
  const FdMailbox mailbox;
  Pipe pipe;
  for (size_t count = 1; count <= 5; ++count) {
    EXPECT_TRUE(Intrude(mailbox.info(), kJunk, count, pipe.write));
  }
  pipe.write.Reset();
  EXPECT_TRUE(HasEnded(pipe));
}

TEST(MailboxTest, MessagesThatAreNotTheNonceAloneAreDropped) {
  FdMailbox mailbox;
  const Pipe pipe;
  const auto& [first, second] = mailbox.info().nonce;
  for (int bit = 0; bit < 64; ++bit) {
    const uint64_t flip = uint64_t{1} << bit;
    EXPECT_TRUE(Intrude(mailbox.info(), Nonce{first ^ flip, second}, 1, pipe.write));
    EXPECT_TRUE(Intrude(mailbox.info(), Nonce{first, second ^ flip}, 1, pipe.write));
  }
  EXPECT_TRUE(Intrude(mailbox.info(), std::array{first}, 1, pipe.write));
  EXPECT_TRUE(Intrude(mailbox.info(), std::array{first, second, first}, 1, pipe.write));
  EXPECT_THAT(ThrownText([&] { mailbox.Take(); }), HasSubstr("no file descriptor from the peer"));
}

TEST(MailboxTest, OnlyOneDescriptorIsTaken) {
  FdMailbox mailbox;
  const Pipe pipe;
  const int32_t before = CountFds();
  for (size_t count = 2; count <= 5; ++count) {
    EXPECT_TRUE(Intrude(mailbox.info(), mailbox.info().nonce, count, pipe.write));
  }
  EXPECT_THAT(ThrownText([&] { mailbox.Take(); }), HasSubstr("no file descriptor from the peer"));
  EXPECT_EQ(CountFds(), before);
}

TEST(MailboxTest, AnotherUserIsRefused) {
  constexpr uid_t kNobody = 65534;
  if (geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  FdMailbox mailbox;
  const Pipe pipe;
  const pid_t child = StartChild([&] {
    EXPECT_EQ(setresuid(kNobody, kNobody, kNobody), 0);
    EXPECT_TRUE(Intrude(mailbox.info(), mailbox.info().nonce, 1, pipe.write));
    return 0;
  });
  EXPECT_EQ(WaitForChild(child), 0);
  EXPECT_THAT(ThrownText([&] { mailbox.Take(); }), HasSubstr("no file descriptor from the peer"));
}

}  // namespace
}  // namespace jaxhet::testing
