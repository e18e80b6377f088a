#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <deque>
#include <string>
#include <vector>

#include "tests/cpp/world.h"

// exchange_bench [TRANSPORT [BYTES...]]: exchanges between two processes of one rank each, over
// every transport or one: both ranks send BYTES to each other (both_ways), or the first one to the
// second (one_way), one exchange after the other, GB/s are BYTES / p50; or the latter with some
// exchanges under way at any time (streamed), all bytes / all time.
namespace jaxhet::testing {
namespace {

constexpr int kReceiver = 1;  // where only one receives
constexpr size_t kInFlight = 4;
constexpr int64_t kMostStreamed = 32;

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

// Each of one run's exchanges, on average.
double StreamedTime(Engine& engine, const ExchangeRequest& first, size_t num_bytes) {
  std::deque<Call> calls;
  const auto most_bytes = static_cast<int64_t>((size_t{64} << 20) / num_bytes);
  for (int64_t i = 0; i < std::clamp<int64_t>(most_bytes, 2 * kInFlight, kMostStreamed); ++i) {
    ExchangeRequest request = first;
    request.index = i;
    calls.push_back(CallOf(std::move(request), num_bytes));
  }
  const Time begin = Clock::now();
  for (size_t i = 0; i < calls.size() + kInFlight; ++i) {
    if (i < calls.size()) calls[i].StartOn(engine);
    if (i >= kInFlight) Await(calls[i - kInFlight]);
  }
  const std::chrono::duration<double> time = Clock::now() - begin;
  return time.count() / static_cast<double>(calls.size());
}

void Run(int process, const WorldOptions& options, std::vector<Ends> ends,
         const std::vector<size_t>& sizes) {
  const auto engine = MakeEngine(process, options, std::move(ends));
  engine->Connect(kLong);
  engine->SetRanks(RanksOf(options));
  engine->AddPlan(kPlan, PlanText(kMostStreamed));
  int64_t run_id = 0;
  for (const auto& [kind, name] : {std::pair{ExchangeKind::kAllGather, "both_ways"},
                                   std::pair{ExchangeKind::kPermute, "one_way"}}) {
    for (const size_t bytes : sizes) {
      const int repeats = bytes < (size_t{1} << 20) ? 400 : 20;
      std::vector<double> times;
      for (int i = 0; i < repeats; ++i) {
        times.push_back(TimeOf(*engine, RequestOf(kind, process, ++run_id), bytes));
      }
      std::ranges::sort(times);
      const double p50 = times[times.size() / 2];
      if (process != kReceiver) continue;
      std::printf("%-9s %-9s %9zu bytes  p50 %9.1f us  p99 %9.1f us  %6.3f GB/s\n",
                  options.transports.front().c_str(), name, bytes, p50 * 1e6,
                  times[times.size() * 99 / 100] * 1e6, static_cast<double>(bytes) / p50 / 1e9);
    }
  }
  for (const size_t bytes : sizes) {
    const auto request = RequestOf(ExchangeKind::kPermute, process, ++run_id);
    const double mean = StreamedTime(*engine, request, bytes);
    if (process != kReceiver) continue;
    std::printf("%-9s %-9s %9zu bytes  mean %8.1f us  %24.3f GB/s\n",
                options.transports.front().c_str(), "streamed", bytes, mean * 1e6,
                static_cast<double>(bytes) / mean / 1e9);
  }
  // Whoever only sent may be far ahead: leaves when the other one has all.
  TimeOf(*engine, RequestOf(ExchangeKind::kAllGather, process, ++run_id), 1);
  engine->Close(kLong);
}

void Bench(const std::string& transport, const std::vector<size_t>& sizes) {
  const WorldOptions options{.transports = {transport}, .engine = {}};
  auto ends = ConnectAll(2, 4);
  const pid_t pid = fork();
  const size_t process = pid == 0 ? 0 : 1;
  ends[1 - process].clear();
  Run(static_cast<int>(process), options, std::move(ends[process]), sizes);
  if (pid == 0) _exit(0);
  waitpid(pid, nullptr, 0);
}

}  // namespace
}  // namespace jaxhet::testing

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  std::vector<size_t> sizes;
  for (size_t i = 1; i < arguments.size(); ++i) sizes.push_back(std::stoul(arguments[i]));
  for (size_t bytes = 512; arguments.size() < 2 && bytes <= size_t{32} << 20; bytes *= 4) {
    sizes.push_back(bytes);
  }
  for (const jaxhet::Transport& transport : jaxhet::Transports()) {
    const std::string name(transport.name);
    if (arguments.empty() || arguments.front() == name) jaxhet::testing::Bench(name, sizes);
  }
}
