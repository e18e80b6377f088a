#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cpp/device_world.h"
#include "tests/cpp/testing.h"
#include "xla_plugin/base/error.h"

// Exchanges between devices over two network paths. One of the paths fails.
namespace jaxhet::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

using std::chrono::milliseconds;
using Sockets = std::vector<std::pair<Fd, Fd>>;

constexpr size_t kNumSockets = 8;
constexpr size_t kNumBytes = kIsThreadSanitized ? size_t{2} << 20 : size_t{16} << 20;

WorldOptions PathOptions(std::string_view transport, std::function<Sockets()> connect) {
  WorldOptions options = DeviceOptions(2, transport);
  options.engine.peer_timeout_ms = 2'000;
  options.engine.heartbeat_ms = 100;
  options.engine.deadline_ms = options.engine.first_deadline_ms = kLong.count();
  options.chunk_sockets = std::move(connect);
  return options;
}

// A swap during which `meanwhile` is called.
void ExpectRightSwap(DeviceWorld& world, int64_t index, const std::function<void()>& meanwhile) {
  ExpectSwap(world, kNumBytes, index, meanwhile, std::pmr::new_delete_resource());
  for (const int rank : {0, 1}) {
    if (const auto failure = world.engine(rank).failure()) ADD_FAILURE() << failure->what();
  }
}

// A sender's slot is free once the kernel has its chunk, which later chunks may overtake.
TEST(DevicePathsTest, SeveralSocketsOfOnePathBringAllChunks) {
  for (const std::string_view transport : {"socket", "sealed"}) {
    DeviceWorld world(PathOptions(transport, [] {
      Sockets sockets;
      for (size_t i = 0; i < kNumSockets; ++i) sockets.push_back(ConnectedPair());
      return sockets;
    }));
    for (int64_t index = 0; index < 3; ++index) ExpectRightSwap(world, index, {});
  }
}

// Lines on stderr.
std::string LinesWhereASocketEnds(std::string_view transport) {
  const CapturedStderr captured;
  Fd cut;
  DeviceWorld world(PathOptions(transport, [&] {
    Sockets sockets;
    for (size_t i = 0; i < kNumSockets; ++i) sockets.push_back(ConnectedPair(i % 2));
    cut = Fd(dup(sockets[3].first.get()));
    return sockets;
  }));
  ExpectRightSwap(world, 0, [&] {
    std::this_thread::sleep_for(milliseconds(1));
    shutdown(cut.get(), SHUT_RDWR);
  });
  std::this_thread::sleep_for(milliseconds(250));
  ExpectRightSwap(world, 1, {});
  for (const int rank : {0, 1}) {
    for (const ChannelBytes& bytes : world.engine(rank).devices()->Bytes()) {
      EXPECT_EQ(bytes.path_failures, bytes.sent > 0 ? 1U : 0U);
    }
  }
  return captured.Text();
}

TEST(DevicePathsTest, GoesOnWhereAPathFails) {
  for (const std::string_view transport : {"socket", "sealed"}) {
    EXPECT_THAT(LinesWhereASocketEnds(transport), HasSubstr("device channels: socket leaves "));
  }
}

TEST(DevicePathsTest, LeavingIsNoFailureOfAPath) {
  const CapturedStderr captured;
  {
    DeviceWorld world(PathOptions("socket", [] {
      Sockets sockets;
      for (size_t i = 0; i < kNumSockets; ++i) sockets.push_back(ConnectedPair(i % 2));
      return sockets;
    }));
    ExpectRightSwap(world, 0, {});
    std::thread closer([&] { world.engine(1).Close(kLong); });
    std::this_thread::sleep_for(milliseconds(400));
    EXPECT_EQ(world.engine(0).failure(), nullptr);
    world.engine(0).Close(kLong);
    closer.join();
  }
  EXPECT_THAT(captured.Text(), Not(HasSubstr("leaves")));
}

// --- network namespaces stand for the hosts ---

int Run(const std::string& command) { return std::system((command + " 2>/dev/null").c_str()); }

// Calls `body` in a thread of its own, which is in the network namespace.
void InNamespace(const Fd& space, const std::function<void()>& body) {
  std::thread([&] {
    if (setns(space.get(), CLONE_NEWNET) == 0) body();
  }).join();
}

Fd NewNamespace() {
  Fd space;
  std::thread([&] {
    if (unshare(CLONE_NEWNET) != 0 || Run("ip link set lo up") != 0) return;
    space = Fd(open("/proc/thread-self/ns/net", O_RDONLY));  // `ip` inherits it
  }).join();
  return space;
}

// Two hosts with two interfaces each: host h has the address 10.78.k.(h + 1) on eth<k>.
class TwoHosts {
 public:
  TwoHosts() : spaces_{NewNamespace(), NewNamespace()} {
    if (!spaces_[0] || !spaces_[1]) return;
    const std::string other = StrCat("/proc/", getpid(), "/fd/", spaces_[1].get());
    InNamespace(spaces_[0], [&] {
      for (const int k : {0, 1}) {
        const std::string name = StrCat("eth", k);
        is_ready_ =
            Run(StrCat("ip link add ", name, " type veth peer name ", name, " netns ", other)) == 0;
        if (!is_ready_) return;
      }
    });
    for (const int host : {0, 1}) {
      InNamespace(spaces_.at(static_cast<size_t>(host)), [&] {
        for (const int k : {0, 1}) {
          is_ready_ &= Run(StrCat("ip addr add 10.78.", k, ".", host + 1, "/24 dev eth", k)) == 0 &&
                       Run(StrCat("ip link set eth", k, " up")) == 0;
        }
      });
    }
  }

  bool is_ready() const { return is_ready_; }
  void TakeDown(int host, int interface) {
    InNamespace(spaces_.at(static_cast<size_t>(host)),
                [&] { Run(StrCat("ip link set eth", interface, " down")); });
  }
  std::pair<Fd, Fd> Connect(int interface) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    inet_pton(AF_INET, StrCat("10.78.", interface, ".1").c_str(), &address.sin_addr);
    socklen_t size = sizeof address;
    auto* const generic = reinterpret_cast<sockaddr*>(&address);
    Fd listener;
    InNamespace(spaces_[0], [&] {
      listener = Fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
      EXPECT_EQ(bind(listener.get(), generic, size), 0);
      EXPECT_EQ(listen(listener.get(), 1), 0);
      EXPECT_EQ(getsockname(listener.get(), generic, &size), 0);
    });
    Fd one;
    InNamespace(spaces_[1], [&] {
      one = Fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
      EXPECT_EQ(connect(one.get(), generic, size), 0);
    });
    return {Fd(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC)), std::move(one)};
  }

 private:
  std::array<Fd, 2> spaces_;
  bool is_ready_ = false;
};

TEST(DevicePathsTest, GoesOnWhenAnInterfaceIsTakenDown) {
  TwoHosts hosts;
  if (!hosts.is_ready()) GTEST_SKIP() << "network namespaces need root and ip (iproute2)";
  const CapturedStderr captured;
  DeviceWorld world(PathOptions("socket", [&] {
    Sockets sockets;
    for (size_t i = 0; i < kNumSockets; ++i)
      sockets.push_back(hosts.Connect(static_cast<int>(i % 2)));
    return sockets;
  }));
  ExpectRightSwap(world, 0, {});
  ExpectRightSwap(world, 1, [&] { hosts.TakeDown(1, 1); });
  ExpectRightSwap(world, 2, {});
  EXPECT_THAT(captured.Text(), HasSubstr("device channels: socket leaves "));
  EXPECT_THAT(captured.Text(), HasSubstr(" (10.78.1."));
}

}  // namespace
}  // namespace jaxhet::testing
