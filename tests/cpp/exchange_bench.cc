#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "tests/cpp/world.h"

// exchange_bench [transport]: all-gathers between two processes of one rank each, over every
// transport or one. busbw is that of nccl-tests: result bytes x (n - 1) / n / time.
namespace jaxhet::testing {
namespace {

double TimeOf(Engine& engine, int rank, size_t operand_bytes, int64_t run_id) {
  ExchangeRequest request;
  request.rank = rank;
  request.run_id = run_id;
  request.plan = kPlan;
  request.group = {0, 1};
  Call call(std::move(request), {operand_bytes}, {2 * operand_bytes});
  const Time begin = Clock::now();
  call.StartOn(engine);
  if (const auto error = call.Wait()) throw Error(*error);
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

void Run(int process, const WorldOptions& options, std::vector<Ends> ends) {
  const auto engine = MakeEngine(process, options, std::move(ends));
  engine->Connect(kLong);
  engine->SetRanks(RanksOf(options));
  engine->AddPlan(kPlan, PlanText(1));
  int64_t run_id = 0;
  for (size_t bytes = 512; bytes <= size_t{32} << 20; bytes *= 4) {
    const int repeats = bytes < (size_t{1} << 20) ? 400 : 20;
    std::vector<double> times;
    for (int i = 0; i < repeats; ++i) times.push_back(TimeOf(*engine, process, bytes, ++run_id));
    std::ranges::sort(times);
    const double p50 = times[times.size() / 2];
    if (process == 0) {
      std::printf("%-9s %9zu bytes  p50 %9.1f us  p99 %9.1f us  busbw %6.2f GB/s\n",
                  options.transports.front().c_str(), 2 * bytes, p50 * 1e6,
                  times[times.size() * 99 / 100] * 1e6, static_cast<double>(bytes) / p50 / 1e9);
    }
  }
  engine->Close(kLong);
}

void Bench(const std::string& transport) {
  const WorldOptions options{.transports = {transport}, .engine = {}};
  auto ends = ConnectAll(2, 4);
  const pid_t pid = fork();
  const size_t process = pid == 0 ? 1 : 0;
  ends[1 - process].clear();
  Run(static_cast<int>(process), options, std::move(ends[process]));
  if (pid == 0) _exit(0);
  waitpid(pid, nullptr, 0);
}

}  // namespace
}  // namespace jaxhet::testing

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  for (const jaxhet::Transport& transport : jaxhet::Transports()) {
    const std::string name(transport.name);
    if (arguments.empty() || arguments.front() == name) jaxhet::testing::Bench(name);
  }
}
