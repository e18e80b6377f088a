#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
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
    for (const PeerCounts& counts : world.engine(rank).devices()->Counts()) {
      EXPECT_EQ(counts.path_failures, counts.bytes_sent > 0 ? 1U : 0U);
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

}  // namespace
}  // namespace jaxhet::testing
