#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "tests/cpp/device_world.h"
#include "tests/cpp/host_device.h"

// device_bench [TRANSPORT [BYTES...]]: swaps between two processes of one host device each, GB/s
// of each direction, and the processor time of a rank's proxy threads.
namespace jaxhet::testing {
namespace {

constexpr int kSockets = 12;  // sockets of a rail and its lanes

WorldOptions BenchOptions(const std::string& transport) {
  WorldOptions options = DeviceOptions(2, transport);
  options.engine.slot_bytes = 16 << 20;
  options.engine.eager_bytes = 64 << 10;
  options.engine.deadline_ms = options.engine.first_deadline_ms = 60'000;
  options.engine.peer_timeout_ms = 60'000;
  return options;
}

// Seconds of processor time, and number, of the threads with such a name.
std::pair<double, int> ThreadsOf(std::string_view prefix) {
  double seconds = 0;
  int count = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm"), name);
    if (!name.starts_with(prefix)) continue;
    double nanoseconds = 0;
    std::ifstream(task.path() / "schedstat") >> nanoseconds;
    seconds += nanoseconds / 1e9;
    ++count;
  }
  return {seconds, count};
}

class Runner {
 public:
  Runner(int rank, const std::string& transport, std::vector<Ends> ends, std::vector<Ends> channels)
      : rank_(rank),
        options_(BenchOptions(transport)),
        engine_(MakeEngine(rank, options_, std::move(ends))) {
    SetUpEngine(*engine_, options_);
    engine_->OpenDevices(HostVendor(), {{rank, 0, {}}}, ChannelSocketsOf(rank, std::move(channels)),
                         kLong);
  }

  void Run(size_t num_bytes) {
    const int repeats = num_bytes < (size_t{1} << 20) ? 300 : 12;
    const double before = ThreadsOf("jaxhet-proxy").first;
    std::vector<double> times;
    Side side(rank_, SwapPairs(), num_bytes, 0, std::pmr::new_delete_resource());
    for (int i = 0; i < repeats; ++i) {
      const Time begin = Clock::now();
      side.StartOn(*engine_, stream_.get());
      side.DoneOn(*engine_, stream_.get());
      device_->Synchronize(stream_.get());
      times.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
    }
    const auto [seconds, num_threads] = ThreadsOf("jaxhet-proxy");
    std::ranges::sort(times);
    const double p50 = times[times.size() / 2];
    if (rank_ == 0) return;
    std::printf(
        "%9zu bytes  p50 %9.1f us  p90 %9.1f us  %6.3f GB/s  %8.1f us of processor  %d threads\n",
        num_bytes, p50 * 1e6, times[times.size() * 9 / 10] * 1e6,
        static_cast<double>(num_bytes) / p50 / 1e9, (seconds - before) / repeats * 1e6,
        num_threads);
    std::fflush(stdout);
  }
  void Close() { engine_->Close(kLong); }

 private:
  int rank_;
  WorldOptions options_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Device> device_ = OpenHostDevice();
  Stream stream_ = device_->CreateStream(StreamPriority::kNormal);
};

}  // namespace
}  // namespace jaxhet::testing

int main(int argc, char** argv) {
  using namespace jaxhet::testing;
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  std::vector<size_t> sizes;
  for (size_t i = 1; i < arguments.size(); ++i) sizes.push_back(std::stoul(arguments[i]));
  if (sizes.empty()) sizes = {1 << 10, 64 << 10, 1 << 20, 16 << 20, 128 << 20};
  auto ends = ConnectAll(2, 1);
  auto channels = ConnectAll(2, kSockets + jaxhet::ChannelSockets::kNumMessageSockets);
  const pid_t pid = fork();
  const size_t rank = pid == 0 ? 0 : 1;
  ends[1 - rank].clear();
  channels[1 - rank].clear();
  {
    Runner runner(static_cast<int>(rank), arguments.empty() ? "socket" : arguments.front(),
                  std::move(ends[rank]), std::move(channels[rank]));
    for (const size_t bytes : sizes) runner.Run(bytes);
    runner.Close();
  }
  if (pid == 0) _exit(0);
  waitpid(pid, nullptr, 0);
}
