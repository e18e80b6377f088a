#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "tests/cpp/world.h"

// exchange_bench [TRANSPORT [WAYS [BYTES...]]]: exchanges between two processes of one rank each,
// over every transport or one. WAYS, or "all": both ranks send BYTES to each other (both_ways), or
// the first one to the second (one_way), one exchange after the other, GB/s are BYTES / p50; or the
// latter with some exchanges under way at any time (streamed), all bytes / all time.
namespace jaxhet::testing {
namespace {

constexpr int kReceiver = 1;  // where only one receives
constexpr int64_t kInFlight = 4;
constexpr int64_t kMostStreamed = 64;  // exchanges
constexpr size_t kStreamedBytes = size_t{64} << 20;

ExchangeRequest RequestOf(ExchangeKind kind, int rank, int64_t run_id) {
  ExchangeRequest request;
  request.rank = rank;
  request.run_id = run_id;
  request.kind = kind;
  request.plan = kPlan;
  request.group = {0, 1};
  if (kind == ExchangeKind::kPermute) request.pairs = {{0, 1}};
  return request;
}

Call CallOf(ExchangeRequest request, size_t num_bytes) {
  const size_t result_bytes = request.kind == ExchangeKind::kAllGather ? 2 * num_bytes : num_bytes;
  return {std::move(request), {num_bytes}, {result_bytes}};
}

void Await(Call& call) {
  if (const auto error = call.Wait()) throw Error(*error);
}

double TimeOf(Engine& engine, ExchangeRequest request, size_t num_bytes) {
  Call call = CallOf(std::move(request), num_bytes);
  const Time begin = Clock::now();
  call.StartOn(engine);
  Await(call);
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Each of one run's exchanges, on average. Every one uses the buffers of one that has ended, as the
// steps of a training do, and as perftest writes one buffer again and again.
double StreamedTime(Engine& engine, ExchangeRequest request, size_t num_bytes) {
  const auto most_bytes = static_cast<int64_t>(kStreamedBytes / num_bytes);
  const auto count = std::clamp<int64_t>(most_bytes, 2 * kInFlight, kMostStreamed);
  std::deque<Call> calls;
  for (request.index = 0; request.index < kInFlight; ++request.index) {
    calls.push_back(CallOf(request, num_bytes));
  }
  const Time begin = Clock::now();
  for (Call& call : calls) call.StartOn(engine);
  for (; request.index < count; ++request.index) {
    Await(calls.front());
    Call next(request, {}, {});
    next.operands = std::move(calls.front().operands);
    next.results = std::move(calls.front().results);
    calls.pop_front();
    calls.push_back(std::move(next));
    calls.back().StartOn(engine);
  }
  for (Call& call : calls) Await(call);
  const std::chrono::duration<double> time = Clock::now() - begin;
  return time.count() / static_cast<double>(count);
}

struct Settings {
  std::string transport;
  std::string ways = "all";
  std::vector<size_t> sizes;
  bool Wants(std::string_view name) const { return ways == "all" || ways == name; }
};

// Sizes of a job, by the defaults of jaxhet/_options.py.
WorldOptions LargeChunks(const std::string& transport) {
  WorldOptions options{.transports = {transport}};
  options.engine.chunk_bytes = 512 << 10;
  options.engine.eager_bytes = 16 << 10;
  options.engine.deadline_ms = options.engine.first_deadline_ms = 60'000;
  return options;
}

// One of the two processes.
class Runner {
 public:
  Runner(int process, const Settings& settings, std::vector<Ends> ends)
      : process_(process),
        settings_(settings),
        engine_(MakeEngine(process, options_, std::move(ends))) {
    engine_->Connect(kLong);
    engine_->SetRanks(RanksOf(options_));
    engine_->AddPlan(kPlan, PlanText(kMostStreamed));
  }

  void Run() {
    RunEach(ExchangeKind::kAllGather, "both_ways");
    RunEach(ExchangeKind::kPermute, "one_way");
    RunStreamed();
    // Whoever only sent may be far ahead: leaves when the other one has all.
    TimeOf(*engine_, Next(ExchangeKind::kAllGather), 1);
    engine_->Close(kLong);
  }

 private:
  ExchangeRequest Next(ExchangeKind kind) { return RequestOf(kind, process_, ++run_id_); }

  void RunEach(ExchangeKind kind, const char* name) {
    if (!settings_.Wants(name)) return;
    for (const size_t bytes : settings_.sizes) {
      const int repeats = bytes < (size_t{1} << 20) ? 400 : 20;
      std::vector<double> times;
      for (int i = 0; i < repeats; ++i) times.push_back(TimeOf(*engine_, Next(kind), bytes));
      std::ranges::sort(times);
      const double p50 = times[times.size() / 2];
      if (process_ != kReceiver) continue;
      std::printf("%-9s %-9s %9zu bytes  p50 %9.1f us  p99 %9.1f us  %6.3f GB/s\n",
                  settings_.transport.c_str(), name, bytes, p50 * 1e6,
                  times[times.size() * 99 / 100] * 1e6, static_cast<double>(bytes) / p50 / 1e9);
    }
  }

  void RunStreamed() {
    if (!settings_.Wants("streamed")) return;
    for (const size_t bytes : settings_.sizes) {
      StreamedTime(*engine_, Next(ExchangeKind::kPermute), bytes);  // warms up
      const double mean = StreamedTime(*engine_, Next(ExchangeKind::kPermute), bytes);
      if (process_ != kReceiver) continue;
      std::printf("%-9s %-9s %9zu bytes  mean %8.1f us  %24.3f GB/s\n", settings_.transport.c_str(),
                  "streamed", bytes, mean * 1e6, static_cast<double>(bytes) / mean / 1e9);
    }
  }

  int process_;
  const Settings& settings_;
  WorldOptions options_ = LargeChunks(settings_.transport);
  std::unique_ptr<Engine> engine_;
  int64_t run_id_ = 0;
};

void Bench(const Settings& settings) {
  auto ends = ConnectAll(2, 4);
  const pid_t pid = fork();
  const size_t process = pid == 0 ? 0 : 1;
  ends[1 - process].clear();
  Runner(static_cast<int>(process), settings, std::move(ends[process])).Run();
  if (pid == 0) _exit(0);
  waitpid(pid, nullptr, 0);
}

}  // namespace
}  // namespace jaxhet::testing

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  jaxhet::testing::Settings settings;
  if (arguments.size() > 1) settings.ways = arguments[1];
  const std::array<std::string_view, 4> known = {"all", "both_ways", "one_way", "streamed"};
  if (std::ranges::find(known, settings.ways) == known.end()) {
    std::fprintf(stderr, "unknown WAYS: %s\n", settings.ways.c_str());
    return 1;
  }
  for (size_t i = 2; i < arguments.size(); ++i) settings.sizes.push_back(std::stoul(arguments[i]));
  for (size_t bytes = 512; arguments.size() < 3 && bytes <= size_t{32} << 20; bytes *= 4) {
    settings.sizes.push_back(bytes);
  }
  for (const jaxhet::Transport& transport : jaxhet::Transports()) {
    settings.transport = transport.name;
    if (arguments.empty() || arguments.front() == transport.name) jaxhet::testing::Bench(settings);
  }
}
