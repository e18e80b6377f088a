#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "tests/cpp/world.h"

// exchange_bench [TRANSPORT [BYTES...]]: exchanges between two processes of one rank each, over
// every transport or one: both ranks send BYTES to each other (both_ways), or the first one to the
// second (one_way), one exchange after the other. GB/s are BYTES / p50.
namespace jaxhet::testing {
namespace {

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

double TimeOf(Engine& engine, ExchangeRequest request, size_t num_bytes) {
  const size_t result_bytes = request.kind == ExchangeKind::kAllGather ? 2 * num_bytes : num_bytes;
  Call call(std::move(request), {num_bytes}, {result_bytes});
  const Time begin = Clock::now();
  call.StartOn(engine);
  if (const auto error = call.Wait()) throw Error(*error);
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

void Run(int process, const WorldOptions& options, std::vector<Ends> ends,
         const std::vector<size_t>& sizes) {
  const auto engine = MakeEngine(process, options, std::move(ends));
  engine->Connect(kLong);
  engine->SetRanks(RanksOf(options));
  engine->AddPlan(kPlan, PlanText(1));
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
      if (process != 1) continue;  // the one that receives in both cases
      std::printf("%-9s %-9s %9zu bytes  p50 %9.1f us  p99 %9.1f us  %6.3f GB/s\n",
                  options.transports.front().c_str(), name, bytes, p50 * 1e6,
                  times[times.size() * 99 / 100] * 1e6, static_cast<double>(bytes) / p50 / 1e9);
    }
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
