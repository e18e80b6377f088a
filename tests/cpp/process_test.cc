#include <pthread.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>

#include "tests/cpp/testing.h"
#include "tests/cpp/world.h"
#include "xla_plugin/base/exit_code.h"
#include "xla_plugin/base/thread.h"

// A process as a whole: its exit code, its signals, and what its forked children keep.
namespace jaxhet::testing {
namespace {

constexpr uid_t kNobody = 65534;

// Exit code of a child that runs `body` and ends in it.
int ExitCodeOf(const std::function<void()>& body) {
  return WaitForChild(StartChild([&] {
    body();
    return kChildFailed;
  }));
}

TEST(ProcessTest, FailedExitHasItsCode) {
  EXPECT_EQ(ExitCodeOf([] { std::exit(0); }), 0);
  EXPECT_EQ(ExitCodeOf([] {
              FailExit(70);
              std::exit(0);
            }),
            70);
}

TEST(ProcessTest, ExitHandlersRunBeforeFailedExit) {
  EXPECT_EQ(ExitCodeOf([] {
              std::atexit([] { _exit(71); });
              FailExit(70);
              std::exit(0);
            }),
            71);
}

TEST(ProcessTest, ExitThatTakesTooLongIsEnded) {
  EXPECT_EQ(ExitCodeOf([] {
              LimitExit([] { return true; }, std::chrono::milliseconds(1), "", 72);
              pause();
            }),
            72);
}

TEST(ProcessTest, OtherExitCodesStay) {
  EXPECT_EQ(ExitCodeOf([] {
              FailExit(70);
              std::exit(3);
            }),
            3);
}

TEST(ProcessTest, ChildOfProcessWithFailedExitSucceeds) {
  EXPECT_EQ(ExitCodeOf([] {
              FailExit(70);
              _exit(ExitCodeOf([] { std::exit(0); }));
            }),
            0);
}

// The signals that the calling thread blocks, as bits.
uint64_t BlockedSignals() {
  sigset_t set;
  pthread_sigmask(SIG_SETMASK, nullptr, &set);
  uint64_t bits = 0;
  for (int signal = 1; signal < 64; ++signal) {
    bits = bits << 1 | (sigismember(&set, signal) == 1 ? 1 : 0);
  }
  return bits;
}

TEST(ProcessTest, ThreadBlocksSignalsItself) {
  const uint64_t before = BlockedSignals();
  uint64_t inside = 0;
  StartThread("test", [&] { inside = BlockedSignals(); }).join();
  EXPECT_NE(inside, before);
  EXPECT_EQ(BlockedSignals(), before);
}

// Root has no limit of threads.
void AllowNoThreads() {
  const rlimit none{.rlim_cur = 0, .rlim_max = 0};
  if (geteuid() == 0 && setresuid(kNobody, kNobody, kNobody) != 0) _exit(98);
  if (setrlimit(RLIMIT_NPROC, &none) != 0) _exit(97);
}

TEST(ProcessTest, ThreadThatCannotStartLeavesSignalsAsTheyWere) {
  EXPECT_EQ(ExitCodeOf([] {
              AllowNoThreads();
              const uint64_t before = BlockedSignals();
              const std::string text = ThrownText([] { StartThread("test", [] {}); });
              const bool is_told = text.ends_with(
                  "DeviceError: the thread test can't start (Resource temporarily unavailable); "
                  "raise this process's limit of threads (ulimit -u, pids.max of its cgroup)");
              _exit(is_told && BlockedSignals() == before ? 0 : 1);
            }),
            0);
}

// The Unix sockets belong to NICs in software.
size_t CountInternetSockets() {
  size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    int domain = 0;
    socklen_t size = sizeof domain;
    const int fd = std::stoi(entry.path().filename());
    if (getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size) == 0 && domain == AF_INET) ++count;
  }
  return count;
}

// With a socket in the child, a peer would not see that this process has died.
TEST(ProcessTest, ForkedChildKeepsNoSocketOfControlOrData) {
  const size_t before = CountInternetSockets();
  {
    World world(WorldOptions{});
    EXPECT_GT(CountInternetSockets(), before);
    EXPECT_EQ(ExitCodeOf([&] {
                for (const int process : {0, 1}) world.engine(process).AbandonInChild();
                _exit(static_cast<int>(CountInternetSockets() - before));
              }),
              0);
  }
  EXPECT_EQ(CountInternetSockets(), before);
}

}  // namespace
}  // namespace jaxhet::testing
