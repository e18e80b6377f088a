#include "tests/cpp/chaos.h"

#include <sys/prctl.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "tests/cpp/testing.h"
#include "xla_plugin/base/strings.h"

// Random faults: a job of two or three processes, on CPUs or on devices in the host's memory, of
// which one is killed or stopped, or one connection is cut or corrupted, at a random
// moment. Each process ends with the right result or with a named error, in time, and leaves
// nothing behind. Environment:
//   CHAOS_ROUNDS  number of rounds (default 20)
//   CHAOS_SEED    seed of the first round (default 1); a round prints its own
// A line for each round: "chaos <seed>: <transport>, <fault>: <how its processes ended> (<n> ms)".
namespace jaxhet::testing {
namespace {

using std::chrono::milliseconds;
using Kind = ChaosOutcome::Kind;

// A peer's silence is known after 0.8 s, and deadlines are 2 s for each of connecting, exchanges
// and closing; a stopped process goes on after 1.3 s. A machine with more runnable threads than
// cores is slower by their ratio.
milliseconds LongestRound() {
  double load = 0;
  if (getloadavg(&load, 1) != 1) load = 0;
  const double slower = std::max(1.0, load / std::max(1U, std::thread::hardware_concurrency()));
  return milliseconds(static_cast<int64_t>((kIsThreadSanitized ? 15'000 : 8'000) * slower));
}

// Why the outcome of a process is not allowed; empty if it is. Pure.
std::string Complaint(const ChaosRound& round, int rank, const ChaosOutcome& outcome) {
  const bool is_killed = round.fault == Fault::kKill && rank == round.victim;
  const std::string text(outcome.Text());
  if (outcome.kind == Kind::kSilent) return is_killed ? "" : text;
  if (outcome.kind == Kind::kWrong) return "a wrong result of " + text;
  if (outcome.num_leaked_fds != 0) return StrCat("leaked descriptors: ", outcome.num_leaked_fds);
  if (outcome.num_leaked_mappings != 0) return "leaked shared memory";
  if (outcome.kind == Kind::kRight) return "";
  if (round.fault == Fault::kNone) return "an error without a fault: " + text;
  const auto names = [&](int process) {
    return text.find(StrCat("process ", process)) != std::string::npos;
  };
  const bool names_failed_process =
      names(round.victim) || (IsOfConnection(round.fault) && names(round.other));
  return text.starts_with("jaxhet.") && names_failed_process
             ? ""
             : "an error that names no process: " + text;
}

// The first complaint about a round; else how its processes ended, each way once.
std::string Summary(const ChaosRound& round, const std::vector<ChaosOutcome>& outcomes) {
  std::set<std::string> names;
  for (size_t rank = 0; rank < outcomes.size(); ++rank) {
    const std::string complaint = Complaint(round, static_cast<int>(rank), outcomes[rank]);
    if (!complaint.empty()) return StrCat("finding, process ", rank, ": ", complaint);
    names.insert(outcomes[rank].Name());
  }
  std::string joined;
  for (const std::string& name : names) joined += (joined.empty() ? "" : " ") + name;
  return joined;
}

// Children that are left, also those of children that have ended.
bool HasChildren() { return waitpid(-1, nullptr, WNOHANG) >= 0; }

std::string RunRound(const ChaosRound& round) {
  const int32_t num_fds = CountFds();
  std::string summary;
  {
    ChaosJob job(round);
    job.Break();
    summary = Summary(round, job.Wait(LongestRound()));
  }
  if (HasChildren()) return "finding, a process is left";
  if (CountFds() != num_fds) return "finding, a descriptor is left";
  return summary;
}

uint64_t Number(const char* name, uint64_t otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

TEST(ChaosTest, RandomFaultsEndInResultsOrNamedErrors) {
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  const uint64_t first = Number("CHAOS_SEED", 1);
  const uint64_t end = first + Number("CHAOS_ROUNDS", 20);
  for (uint64_t seed = first; seed < end; ++seed) {
    const ChaosRound round(seed);
    const auto begin = std::chrono::steady_clock::now();
    std::string summary = RunRound(round);
    std::ranges::replace(summary, '\n', ' ');
    const auto time = std::chrono::steady_clock::now() - begin;
    const auto time_ms = std::chrono::duration_cast<milliseconds>(time).count();
    std::fprintf(stderr, "chaos %llu: %s, %s: %s (%lld ms)\n",
                 static_cast<unsigned long long>(seed), round.Path().c_str(),
                 std::string(NameOf(round.fault)).c_str(), summary.c_str(),
                 static_cast<long long>(time_ms));
    if (!summary.starts_with("finding")) continue;
    ADD_FAILURE() << "CHAOS_SEED=" << seed << ": " << summary;
  }
}

}  // namespace
}  // namespace jaxhet::testing
