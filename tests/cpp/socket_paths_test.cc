#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cpp/testing.h"
#include "tests/cpp/world.h"

// Two processes whose data connections go over several paths, of which some fail.
namespace jaxhet::testing {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

using std::chrono::microseconds;

constexpr size_t kNumPaths = 2;
constexpr size_t kNumBytes = kIsThreadSanitized ? size_t{2} << 20 : size_t{8} << 20;

// Data socket i of each process is of path i % num_paths. The control connection is of path 0.
std::vector<std::vector<Ends>> Connected(size_t num_paths) {
  return ConnectAll(2, 2 * kNumPaths, num_paths);
}

// The same without data sockets of path 0.
std::vector<std::vector<Ends>> ConnectedBesideControl() {
  auto ends = ConnectAll(2, 2, 2);
  for (auto* const data : {&ends[0][1].data, &ends[1][0].data}) data->erase(data->begin());
  return ends;
}

class PathWorld {
 public:
  explicit PathWorld(const std::string& encryption = "off", size_t num_paths = kNumPaths)
      : PathWorld(encryption, Connected(num_paths)) {}
  PathWorld(const std::string& encryption, std::vector<std::vector<Ends>> ends,
            const std::string& log_level = "info") {
    WorldOptions options = FaultOptions("socket");
    options.engine.encryption = encryption;
    options.engine.log_level = log_level;
    for (size_t process = 0; process < 2; ++process) {
      for (const Fd& fd : ends[process][1 - process].data) {
        data_.at(process).emplace_back(dup(fd.get()));
      }
    }
    world_ = std::make_unique<World>(options, std::move(ends));
  }

  Engine& engine(size_t process) { return world_->engine(static_cast<int>(process)); }

  // Ends a data connection at one process; the other one reads the bytes sent before.
  void Cut(size_t socket, size_t process = 0) {
    shutdown(data_.at(process).at(socket).get(), SHUT_RDWR);
  }

  // TCP_USER_TIMEOUT of a data socket of process 0; 0: unlimited.
  unsigned SilenceLimitMs(size_t socket) {
    unsigned timeout_ms = 0;
    socklen_t size = sizeof timeout_ms;
    const int fd = data_[0].at(socket).get();
    EXPECT_EQ(getsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout_ms, &size), 0);
    return timeout_ms;
  }

  // GatherBoth(); empty texts where the results are right.
  std::array<std::string, 2> Gather(int64_t run_id, const std::function<void()>& meanwhile = {}) {
    std::array<std::string, 2> texts;
    const auto errors = GatherBoth(*world_, kNumBytes, run_id, meanwhile);
    for (const size_t rank : {0U, 1U}) {
      if (errors.at(rank)) texts.at(rank) = errors.at(rank)->what();
    }
    return texts;
  }

  // Counts that `process` keeps about the other one.
  PeerCounts Counts(size_t process) {
    const auto counts = engine(process).Read(
        [](const ProgressEngine& progress) { return progress.peers().Counts(); });
    return *std::ranges::find(counts, 1 - static_cast<int>(process), &PeerCounts::process);
  }

 private:
  std::unique_ptr<World> world_;
  std::array<std::vector<Fd>, 2> data_;  // at each process
};

void ExpectRight(const std::array<std::string, 2>& errors,
                 const Location& location = Location::current()) {
  const CalledAt here(location);
  EXPECT_THAT(errors, Each(IsEmpty()));
}

// Each byte counts once, although some were sent twice.
void ExpectCounts(PathWorld& world, uint64_t num_bytes, uint64_t path_failures,
                  const Location& location = Location::current()) {
  const CalledAt here(location);
  for (const size_t process : {0U, 1U}) {
    const PeerCounts counts = world.Counts(process);
    EXPECT_EQ(counts.bytes_sent, num_bytes);
    EXPECT_EQ(counts.bytes_received, num_bytes);
    EXPECT_EQ(counts.path_failures, path_failures);
  }
}

// One path fails at each end, in mid-exchange and at about the same time.
TEST(SocketPathsTest, GoesOnOverTheLastOfThreePaths) {
  for (int round = 0; round < 2; ++round) {
    PathWorld world(round % 2 == 0 ? "off" : "full", 3);
    ExpectRight(world.Gather(1, [&] {
      std::this_thread::sleep_for(microseconds(500 + 2'000 * round));
      world.Cut(0, 0);
      world.Cut(1, 1);
    }));
    std::this_thread::sleep_for(std::chrono::milliseconds(250));
    ExpectRight(world.Gather(2));
    ExpectCounts(world, 2 * kNumBytes, 2);
  }
}

// Lines on stderr when one path of a job fails, and then all.
std::string LinesOfFailures(const std::string& log_level) {
  const CapturedStderr captured;
  PathWorld world("off", Connected(kNumPaths), log_level);
  ExpectRight(world.Gather(1, [&] { world.Cut(0); }));
  std::this_thread::sleep_for(std::chrono::milliseconds(250));
  for (size_t socket = 0; socket < 2 * kNumPaths; ++socket) world.Cut(socket);
  for (const size_t process : {0U, 1U})
    EXPECT_NE(world.engine(process).WaitFailure(kLong), nullptr);
  return captured.Text();
}

TEST(SocketPathsTest, LogLevelHidesWarningsAndNoErrors) {
  constexpr const char* kWarning = ": socket leaves ";
  constexpr const char* kError = "jaxhet.PeerError: [process ";
  const std::string all = LinesOfFailures("info");
  EXPECT_THAT(all, HasSubstr(kWarning));
  EXPECT_THAT(all, HasSubstr(kError));
  EXPECT_THAT(LinesOfFailures("warning"), HasSubstr(kWarning));
  for (const char* const level : {"error", "critical"}) {
    const std::string errors = LinesOfFailures(level);
    EXPECT_THAT(errors, Not(HasSubstr(kWarning)));
    EXPECT_THAT(errors, HasSubstr(kError));
  }
}

// Each end leaves the path that the other one still has.
TEST(SocketPathsTest, EndsInWordsWhereAllPathsFailInMidExchange) {
  PathWorld world;
  constexpr const char* kWords = "no data connection is left; the last was over ";
  std::array<std::string, 2> errors;
  // The paths count as ended a moment later: some exchanges may still end well.
  for (int64_t run_id = 1; run_id <= 1'000 && errors[0].empty() && errors[1].empty(); ++run_id) {
    errors = world.Gather(run_id, [&] {
      world.Cut(0, 0);
      world.Cut(1, 1);
    });
  }
  EXPECT_TRUE(!errors[0].empty() || !errors[1].empty());
  for (const size_t process : {0U, 1U}) {
    if (!errors.at(process).empty()) {
      EXPECT_THAT(errors.at(process), HasSubstr(kWords));
    }
    const auto failure = world.engine(process).WaitFailure(kLong);
    ASSERT_NE(failure, nullptr);
    EXPECT_THAT(failure->what(), HasSubstr(kWords));
  }
}

TEST(SocketPathsTest, UsesAllPathsWhereNoneFails) {
  PathWorld world;
  for (int64_t run_id = 1; run_id <= 3; ++run_id) ExpectRight(world.Gather(run_id));
  ExpectCounts(world, 3 * kNumBytes, 0);
}

// All its connections end. The other process may see the ends in any order.
TEST(SocketPathsTest, LeavingIsNoFailureOfAPath) {
  PathWorld world;
  ExpectRight(world.Gather(1));
  std::thread closer([&] { world.engine(1).Close(kLong); });
  std::this_thread::sleep_for(std::chrono::milliseconds(400));
  EXPECT_EQ(world.Counts(0).path_failures, uint64_t{0});
  EXPECT_EQ(world.engine(0).failure(), nullptr);
  world.engine(0).Close(kLong);
  closer.join();
}

// The end that found it first says so; one of the addresses is not named at any interface.
void ExpectPathIsNamed(PathWorld& world, const std::vector<size_t>& cuts, const char* words) {
  ExpectRight(world.Gather(1));
  for (const size_t socket : cuts) world.Cut(socket);
  for (const size_t process : {0U, 1U}) {
    const auto error = world.engine(process).WaitFailure(kLong);
    ASSERT_NE(error, nullptr);
    EXPECT_THAT(error->what(), AllOf(HasSubstr("jaxhet.PeerError: [process "), HasSubstr(words),
                                     HasSubstr(" (127.")));
  }
}

TEST(SocketPathsTest, LastPathIsNamed) {
  constexpr const char* kLast = "no data connection is left; the last was over ";
  PathWorld several;
  ExpectPathIsNamed(several, {0, 1, 2, 3}, kLast);
  EXPECT_THAT(several.engine(0).failure()->what(),
              HasSubstr("name the interfaces to use with JAXHET_SOCKET_INTERFACES"));
  PathWorld beside_control("off", ConnectedBesideControl());
  ExpectPathIsNamed(beside_control, {0}, kLast);
  PathWorld one("off", 1);
  ExpectPathIsNamed(one, {1}, "a data connection over ");
}

// A process that leaves the job hands its last data to the kernel, which must not give them up
// while the peer is stopped. Where chunks are confirmed, the peer has all data before.
TEST(SocketPathsTest, SilenceIsLimitedWhereChunksAreConfirmed) {
  PathWorld one("off", 1);
  PathWorld two;
  PathWorld beside("off", ConnectedBesideControl());
  EXPECT_EQ(one.SilenceLimitMs(0), 0U);
  for (size_t socket = 0; socket < 2 * kNumPaths; ++socket)
    EXPECT_GT(two.SilenceLimitMs(socket), 0);
  EXPECT_GT(beside.SilenceLimitMs(0), 0);
}

}  // namespace
}  // namespace jaxhet::testing
