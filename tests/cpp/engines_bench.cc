#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <future>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

#include "tests/cpp/device_world.h"
#include "tests/cpp/host_device.h"

// engines_bench [RANKS [REPEATS [BYTES...]]]: the price of one engine for CPUs and GPUs. Processes
// of one rank each run the same collectives in turn over the engine for CPUs (process_vm or
// socket), and over the engine for GPUs with the host as device: through slots, and pulled out of
// memory that the ranks share. Prints medians, and ratios to the engine for CPUs.
namespace jaxhet::testing {
namespace {

// Defaults of jaxhet/_options.py and of the CPU's compiler.
constexpr size_t kChunkBytes = size_t{512} << 10;
constexpr size_t kEagerBytesOfJobs = size_t{16} << 10;
constexpr size_t kDeviceSlotBytes = size_t{8} << 20;
constexpr size_t kTwoShotBytes = size_t{64} << 10;

using Operand = std::span<const std::byte>;
using Result = std::span<std::byte>;

struct Settings {
  int num_ranks = 2;
  std::string transport = "host";
  int repeats = 5;
  std::vector<size_t> sizes = {1 << 10, 64 << 10, 1 << 20, 16 << 20};
};

WorldOptions JobOptions(const Settings& settings) {
  WorldOptions options{.num_processes = settings.num_ranks, .transports = {settings.transport}};
  // Host memory between devices is read in place between CPUs.
  if (settings.transport == "host") options.transports.emplace_back("process_vm");
  options.engine.chunk_bytes = kChunkBytes;
  options.engine.eager_bytes = kEagerBytesOfJobs;
  options.engine.slot_bytes = kDeviceSlotBytes;
  options.engine.heartbeat_ms = 1'000;
  options.engine.deadline_ms = options.engine.first_deadline_ms = 60'000;
  return options;
}

// The exchanges of one rank over one path; each returns when its result is there.
class Path {
 public:
  Path(Engine& engine, int rank, int num_ranks)
      : engine_(engine), rank_(rank), members_(num_ranks) {
    std::iota(members_.begin(), members_.end(), 0);
    for (const int64_t member : members_) {
      ring_.push_back(member);
      ring_.push_back((member + 1) % num_ranks);
    }
  }
  virtual ~Path() = default;
  Path(const Path&) = delete;
  Path& operator=(const Path&) = delete;

  virtual void Exchange(ExchangeKind kind, Operand operand, Result result) = 0;

 protected:
  const std::vector<int64_t>& RanksOf(ExchangeKind kind) const {
    return kind == ExchangeKind::kPermute ? ring_ : members_;
  }

  Engine& engine_;
  int rank_;
  std::vector<int64_t> members_;
  std::vector<int64_t> ring_;
};

class CpuPath final : public Path {
 public:
  using Path::Path;

  void Exchange(ExchangeKind kind, Operand operand, Result result) override {
    std::promise<std::optional<Error>> promise;
    ExchangeRequest request;
    request.rank = rank_;
    request.run_id = ++run_id_;
    request.kind = kind;
    request.plan = kPlan;
    request.group = std::vector<int>(members_.begin(), members_.end());
    if (kind == ExchangeKind::kPermute) request.pairs = PairsOf(ring_);
    request.operands = {operand};
    request.results = {result};
    request.done = [&](const Error* error) {
      promise.set_value(error == nullptr ? std::nullopt : std::optional(*error));
    };
    engine_.Start(std::move(request));
    if (const auto error = promise.get_future().get()) throw Error(*error);
  }

 private:
  int64_t run_id_ = 0;
};

class DevicePath final : public Path {
 public:
  using Path::Path;

  void Exchange(ExchangeKind kind, Operand operand, Result result) override {
    const auto devices = engine_.devices();
    devices->Start(0, {.stream = stream_.get(),
                       .kind = kind,
                       .plan = kPlan,
                       .ranks = RanksOf(kind),
                       .group_size = static_cast<int64_t>(members_.size()),
                       .operand = operand,
                       .result = result,
                       .poison = kPoison});
    devices->Done(0, stream_.get(), kPlan, 0);
    device_->Synchronize(stream_.get());
  }

 private:
  std::unique_ptr<Device> device_ = OpenHostDevice();
  Stream stream_ = device_->CreateStream(StreamPriority::kNormal);
};

void Add(Operand from, Result to) {
  const auto* const addends = reinterpret_cast<const float*>(from.data());
  auto* const sums = reinterpret_cast<float*>(to.data());
  for (size_t i = 0; i < to.size() / sizeof(float); ++i) sums[i] += addends[i];
}

void SumRows(Operand rows, Result sum) {
  std::memcpy(sum.data(), rows.data(), sum.size());
  for (size_t row = sum.size(); row < rows.size(); row += sum.size()) {
    Add(rows.subspan(row, sum.size()), sum);
  }
}

// An all-reduce as jaxhet/compiler/cpu_form.py lowers it. `scratch` is for operands of other ranks,
// `shard` for the rank's part of the sum.
void AllReduce(Path& path, size_t num_ranks, Operand operand, Result result, Result scratch,
               Result shard) {
  if (operand.size() <= kTwoShotBytes) {
    const Result rows = scratch.first(num_ranks * operand.size());
    path.Exchange(ExchangeKind::kAllGather, operand, rows);
    SumRows(rows, result);
    return;
  }
  const Result received = scratch.first(operand.size());
  if (num_ranks == 2) {
    path.Exchange(ExchangeKind::kPermute, operand, received);
    std::memcpy(result.data(), operand.data(), operand.size());
    Add(received, result);
  } else {
    const Result sum = shard.first(operand.size() / num_ranks);
    path.Exchange(ExchangeKind::kAllToAll, operand, received);
    SumRows(received, sum);
    path.Exchange(ExchangeKind::kAllGather, sum, result);
  }
}

constexpr std::array<const char*, 3> kCollectives = {"all_reduce", "all_gather", "permute"};
constexpr std::array<const char*, 4> kPaths = {"cpu", "slots", "pulled", "read"};

class Runner {
 public:
  Runner(int rank, const Settings& settings, std::vector<Ends> ends, std::vector<Ends> channel_ends)
      : rank_(rank),
        settings_(settings),
        options_(JobOptions(settings)),
        most_bytes_(std::ranges::max(settings.sizes)),
        memory_(device_->Allocate(2 * most_bytes_ + kProofs)),
        engine_(MakeEngine(rank, options_, std::move(ends))) {
    SetUpEngine(*engine_, options_);
    engine_->OpenDevices(HostVendor(), {{rank, 0, Shared(2 * most_bytes_ + kProofs)}},
                         ChannelSocketsOf(rank, std::move(channel_ends)), kLong);
    engine_->AddPlan(kPlan + 1, PlanText(8));
  }

  void Run() {
    CpuPath cpu(*engine_, rank_, settings_.num_ranks);
    DevicePath device(*engine_, rank_, settings_.num_ranks);
    for (const char* const collective : kCollectives) {
      for (const size_t num_bytes : settings_.sizes) {
        RunEach(collective, num_bytes, {&cpu, &device, &device, &device});
      }
    }
    cpu.Exchange(ExchangeKind::kAllGather, Operand(own_).first(1),
                 Result(scratch_).first(static_cast<size_t>(settings_.num_ranks)));
    engine_->Close(kLong);
  }

 private:
  static constexpr size_t kProofs = kProofBytes * 16;

  Result Shared(size_t num_bytes) const {
    return {static_cast<std::byte*>(memory_.get()), num_bytes};
  }

  // Paths take turns, so that what else the machine does meets all of them.
  void RunEach(std::string_view collective, size_t num_bytes,
               const std::array<Path*, kPaths.size()>& paths) {
    const int count = settings_.repeats * (num_bytes < (size_t{1} << 20) ? 200 : 20);
    const size_t num_paths = settings_.transport == "host" ? paths.size() : 2;
    std::array<std::vector<double>, kPaths.size()> times;
    for (int i = 0; i < count; ++i) {
      for (size_t p = 0; p < num_paths; ++p) {
        const bool is_pulled = p >= 2;
        const auto reads = p == 3 ? std::make_unique<KernelReads>() : nullptr;
        const Result operand = is_pulled ? Shared(num_bytes) : Result(own_).first(num_bytes);
        const Result shard = is_pulled ? Shared(2 * num_bytes).last(num_bytes) : Result(shard_);
        const Time begin = Clock::now();
        Once(*paths[p], collective, operand, shard);
        times[p].push_back(std::chrono::duration<double>(Clock::now() - begin).count() * 1e6);
      }
    }
    if (rank_ == 0) Print(collective, num_bytes, times);
  }

  void Once(Path& path, std::string_view collective, Operand operand, Result shard) {
    const auto num_ranks = static_cast<size_t>(settings_.num_ranks);
    if (collective == "all_reduce") {
      AllReduce(path, num_ranks, operand, Result(result_).first(operand.size()), scratch_, shard);
    } else if (collective == "all_gather") {
      path.Exchange(ExchangeKind::kAllGather, operand,
                    Result(scratch_).first(num_ranks * operand.size()));
    } else {
      path.Exchange(ExchangeKind::kPermute, operand, Result(result_).first(operand.size()));
    }
  }

  void Print(std::string_view collective, size_t num_bytes,
             std::array<std::vector<double>, kPaths.size()>& times) const {
    std::printf("%d ranks %s %-10s %9zu bytes:", settings_.num_ranks, settings_.transport.c_str(),
                collective.data(), num_bytes);
    double of_cpu = 0;
    for (size_t p = 0; p < kPaths.size(); ++p) {
      if (times[p].empty()) continue;
      std::ranges::sort(times[p]);
      const double p50 = times[p][times[p].size() / 2];
      if (p == 0) of_cpu = p50;
      std::printf("  %s %8.1f (%.2f)", kPaths[p], p50, p50 / of_cpu);
    }
    std::printf("\n");
    std::fflush(stdout);
  }

  int rank_;
  const Settings& settings_;
  WorldOptions options_;
  size_t most_bytes_;
  std::unique_ptr<Device> device_ = OpenHostDevice();
  DeviceMemory memory_;
  std::unique_ptr<Engine> engine_;
  std::vector<std::byte> own_ = std::vector<std::byte>(most_bytes_, std::byte{1});
  std::vector<std::byte> shard_ = std::vector<std::byte>(most_bytes_);
  std::vector<std::byte> result_ = std::vector<std::byte>(most_bytes_);
  std::vector<std::byte> scratch_ =
      std::vector<std::byte>(most_bytes_ * static_cast<size_t>(settings_.num_ranks));
};

void Main(const Settings& settings) {
  auto ends = ConnectAll(settings.num_ranks, 4);
  auto channel_ends = ConnectAll(settings.num_ranks, kChannelSockets);
  int rank = 0;
  while (rank + 1 < settings.num_ranks && fork() != 0) ++rank;
  const bool is_last = rank + 1 == settings.num_ranks;
  std::vector<Ends> own = std::move(ends[static_cast<size_t>(rank)]);
  std::vector<Ends> own_channels = std::move(channel_ends[static_cast<size_t>(rank)]);
  ends.clear();
  channel_ends.clear();
  Runner(rank, settings, std::move(own), std::move(own_channels)).Run();
  if (!is_last) _exit(0);
  while (wait(nullptr) > 0) {
  }
}

}  // namespace
}  // namespace jaxhet::testing

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  jaxhet::testing::Settings settings;
  if (!arguments.empty()) settings.num_ranks = std::stoi(arguments[0]);
  if (arguments.size() > 1) settings.transport = arguments[1];
  if (arguments.size() > 2) settings.repeats = std::stoi(arguments[2]);
  if (arguments.size() > 3) settings.sizes.clear();
  for (size_t i = 3; i < arguments.size(); ++i) settings.sizes.push_back(std::stoul(arguments[i]));
  jaxhet::testing::Main(settings);
}
