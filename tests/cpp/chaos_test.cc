#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cpp/testing.h"
#include "tests/cpp/world.h"

// Random faults: a job of two or three processes, of which one is killed or stopped, or one
// connection is cut or disturbed, at a random moment. Each process ends with the right result or
// with a named error, in time, and leaves nothing behind. Environment:
//   CHAOS_ROUNDS  number of rounds (default 20)
//   CHAOS_SEED    seed of the first round (default 1); a failing round prints its own
namespace jaxhet::testing {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using Random = std::mt19937_64;

constexpr milliseconds kLongestRound{15'000};  // deadlines are 2 s: all else is a slow machine
constexpr int64_t kPeerTimeoutMs = 400;
constexpr int64_t kDeadlineMs = 2'000;

enum class Fault : uint8_t { kNone, kKill, kStop, kCutControl, kCutData, kDisturbControl };
constexpr std::array<const char*, 6> kFaultNames = {"none",        "kill",     "stop",
                                                    "cut control", "cut data", "disturb control"};

// A round, as its seed says.
struct Round {
  explicit Round(uint64_t its_seed) : seed(its_seed) {
    Random random(seed);
    transport = random() % 2 == 0 ? "shm" : "tcp";
    num_processes = 2 + static_cast<int>(random() % 2);
    constexpr std::array kFaults = {Fault::kNone,    Fault::kKill,          Fault::kKill,
                                    Fault::kStop,    Fault::kCutControl,    Fault::kCutData,
                                    Fault::kCutData, Fault::kDisturbControl};
    fault = kFaults[random() % kFaults.size()];
    victim = static_cast<int>(random() % static_cast<uint64_t>(num_processes));
    other = (victim + 1) % num_processes;
    delay = microseconds(random() % 12'000);
    // Some wake up before the others give them up.
    stop_time = milliseconds(random() % 3 == 0 ? random() % 200 : 700 + random() % 200);
    constexpr std::array<size_t, 9> kSizes = {0,      1,      7,       1'000,    65'535,
                                              65'536, 65'537, 300'001, 1'048'576};
    for (uint64_t i = random() % 12 + 1; i > 0; --i) {
      sizes.push_back(kSizes[random() % kSizes.size()]);
    }
    for (uint64_t i = random() % 64 + 1; i > 0; --i) junk.push_back(static_cast<char>(random()));
  }

  uint64_t seed;
  std::string transport;
  int num_processes;
  Fault fault;
  int victim;
  int other;  // at the other end of the connection
  microseconds delay;
  milliseconds stop_time;
  std::vector<size_t> sizes;  // of exchanges
  std::string junk;
};

// How a process has ended, as it says itself.
struct Outcome {
  enum class Kind : int32_t { kSilent, kRight, kError, kWrong };

  Kind kind = Kind::kSilent;
  int32_t num_leaked_fds = 0;
  int32_t num_leaked_mappings = 0;
  std::array<char, 400> text{};

  void Say(Kind its_kind, std::string_view its_text) {
    kind = its_kind;
    std::memcpy(text.data(), its_text.data(), std::min(its_text.size(), text.size() - 1));
  }
};

int32_t CountFds() {
  DIR* const directory = opendir("/proc/self/fd");
  int32_t count = 0;
  while (readdir(directory) != nullptr) ++count;
  closedir(directory);
  return count;
}

int32_t CountMappings() {
  std::ifstream maps("/proc/self/maps");
  int32_t count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += line.find("memfd:jaxhet") != std::string::npos ? 1 : 0;
  }
  return count;
}

WorldOptions OptionsOf(const Round& round) {
  WorldOptions options{.num_processes = round.num_processes, .transports = {round.transport}};
  options.engine = {.heartbeat_ms = 40,
                    .peer_timeout_ms = kPeerTimeoutMs,
                    .deadline_ms = kDeadlineMs,
                    .first_deadline_ms = kDeadlineMs,
                    .chunk_bytes = 64 << 10,
                    .eager_bytes = 0};
  return options;
}

// Gathers from all ranks; false for a wrong result.
bool GatherRightly(Engine& engine, const Round& round, int rank, size_t step) {
  const size_t num_bytes = round.sizes[step];
  ExchangeRequest request = GatherRequest(rank, static_cast<int64_t>(step) + 1);
  request.group.clear();
  for (int i = 0; i < round.num_processes; ++i) request.group.push_back(i);
  Call call(std::move(request), {num_bytes}, {num_bytes * request.group.size()});
  call.StartOn(engine);
  if (const auto error = call.Wait()) throw Error(*error);
  for (int i = 0; i < round.num_processes; ++i) {
    const std::span part = std::span(call.results[0]).subspan(static_cast<size_t>(i) * num_bytes);
    if (!AreEqual(part.first(num_bytes), Pattern(i, 0, num_bytes))) return false;
  }
  return true;
}

void RunExchanges(const Round& round, int rank, std::vector<Ends> ends, Outcome& outcome) {
  const WorldOptions options = OptionsOf(round);
  const auto engine = MakeEngine(rank, options, std::move(ends));
  try {
    engine->Connect(milliseconds(kDeadlineMs));
    engine->SetRanks(RanksOf(options));
    engine->AddPlan(kPlan, PlanText(8));
    outcome.Say(Outcome::Kind::kRight, "");
    for (size_t step = 0; step < round.sizes.size(); ++step) {
      if (GatherRightly(*engine, round, rank, step)) continue;
      outcome.Say(Outcome::Kind::kWrong, StrCat("exchange ", step));
      break;
    }
  } catch (const Error& error) {
    outcome.Say(Outcome::Kind::kError, error.what());
  }
  engine->Close(milliseconds(kDeadlineMs));
}

// A process of the job. It has no other files than these and those that its parent began with.
[[noreturn]] void BeProcess(const Round& round, int rank, std::vector<Ends> ends,
                            int num_fds_before, const Fd& report) {
  if (std::freopen("/dev/null", "w", stderr) == nullptr) _exit(1);  // errors are reported
  Outcome outcome;
  RunExchanges(round, rank, std::move(ends), outcome);
  outcome.num_leaked_fds = CountFds() - num_fds_before;
  outcome.num_leaked_mappings = CountMappings();
  _exit(write(report.get(), &outcome, sizeof outcome) == sizeof outcome ? 0 : 1);
}

class Job {
 public:
  explicit Job(const Round& round) : round_(round) {
    std::fflush(stderr);
    auto ends = ConnectAll(round.num_processes);
    const int num_fds = CountFds();
    const auto num_ends = static_cast<int>(3 * (ends.size() - 1) * ends.size());
    for (int rank = 0; rank < round.num_processes; ++rank) {
      std::array<int, 2> pipe_ends{};
      if (pipe2(pipe_ends.data(), O_CLOEXEC) != 0) ThrowErrno("pipe2");
      Fd report(pipe_ends[1]);
      reports_.emplace_back(pipe_ends[0]);
      const pid_t pid = fork();
      if (pid == 0) {
        std::vector<Ends> own = std::move(ends[static_cast<size_t>(rank)]);
        ends.clear();
        const int num_pipes = static_cast<int>(reports_.size()) + 1;
        BeProcess(round, rank, std::move(own), num_fds - num_ends + num_pipes, report);
      }
      pids_.push_back(pid);
    }
    Ends& chosen = ends[static_cast<size_t>(round.victim)][static_cast<size_t>(round.other)];
    connection_ =
        std::move(round.fault == Fault::kCutData ? chosen.data[round.seed % 2] : chosen.control);
    if (round.fault < Fault::kCutControl) connection_.Reset();
  }

  // The connection is closed here at once: the processes have it alone.
  void Break() {
    std::this_thread::sleep_for(round_.delay);
    const pid_t victim = pids_[static_cast<size_t>(round_.victim)];
    switch (round_.fault) {
      case Fault::kNone:
        return;
      case Fault::kKill:
        kill(victim, SIGKILL);
        return;
      case Fault::kStop:
        kill(victim, SIGSTOP);
        std::this_thread::sleep_for(round_.stop_time);
        kill(victim, SIGCONT);
        return;
      case Fault::kCutControl:
      case Fault::kCutData:
        shutdown(connection_.get(), SHUT_RDWR);
        break;
      case Fault::kDisturbControl:
        [[maybe_unused]] const ssize_t sent =
            send(connection_.get(), round_.junk.data(), round_.junk.size(), MSG_NOSIGNAL);
        break;
    }
    connection_.Reset();
  }

  // By rank; silent for a process that says nothing in time, or that was killed.
  std::vector<Outcome> Wait() {
    const Time limit = Clock::now() + kLongestRound;
    std::vector<Outcome> outcomes;
    for (const Fd& report : reports_) outcomes.push_back(ReadUntil(report, limit));
    for (const pid_t pid : pids_) {
      if (Clock::now() > limit) kill(pid, SIGKILL);
      int status = 0;
      waitpid(pid, &status, 0);
    }
    return outcomes;
  }

 private:
  static Outcome ReadUntil(const Fd& report, Time limit) {
    const auto left = std::chrono::ceil<milliseconds>(limit - Clock::now());
    pollfd polled{.fd = report.get(), .events = POLLIN, .revents = 0};
    Outcome outcome;
    const auto timeout_ms = static_cast<int>(std::max<int64_t>(left.count(), 0));
    if (poll(&polled, 1, timeout_ms) <= 0) return outcome;
    if (read(report.get(), &outcome, sizeof outcome) != sizeof outcome) return {};
    return outcome;
  }

  const Round& round_;
  std::vector<pid_t> pids_;
  std::vector<Fd> reports_;
  Fd connection_;
};

// Why the outcome of a process is not allowed; empty if it is. Pure.
std::string Complaint(const Round& round, int rank, const Outcome& outcome) {
  const bool is_killed = round.fault == Fault::kKill && rank == round.victim;
  const std::string text = outcome.text.data();
  if (outcome.kind == Outcome::Kind::kSilent) return is_killed ? "" : "it hangs or has crashed";
  if (outcome.kind == Outcome::Kind::kWrong) return "a wrong result of " + text;
  if (outcome.num_leaked_fds != 0) return StrCat("leaked descriptors: ", outcome.num_leaked_fds);
  if (outcome.num_leaked_mappings != 0) return "leaked shared memory";
  if (outcome.kind == Outcome::Kind::kRight) return "";
  if (round.fault == Fault::kNone) return "an error without a fault: " + text;
  const auto names = [&](int process) {
    return text.find(StrCat("process ", process)) != std::string::npos;
  };
  const bool is_connection = round.fault >= Fault::kCutControl;
  const bool names_culprit = names(round.victim) || (is_connection && names(round.other));
  return text.starts_with("jaxhet.") && names_culprit ? "" : "an error that blames nobody: " + text;
}

std::string NameOf(const Outcome& outcome) {
  if (outcome.kind == Outcome::Kind::kSilent) return "killed";
  if (outcome.kind == Outcome::Kind::kRight) return "right";
  const std::string text = outcome.text.data();
  return text.substr(text.find('.') + 1, text.find(':') - text.find('.') - 1);
}

uint64_t Number(const char* name, uint64_t otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

// Lines "chaos <transport>, <fault>, <outcomes>: <rounds>", of rounds by the set of how their
// processes ended.
TEST(RandomFaultsEndInResultsOrNamedErrors) {
  const uint64_t first = Number("CHAOS_SEED", 1);
  const uint64_t end = first + Number("CHAOS_ROUNDS", 20);
  std::map<std::string, int> counts;
  for (uint64_t seed = first; seed < end; ++seed) {
    const Round round(seed);
    const int32_t num_fds = CountFds();
    std::set<std::string> names;
    {
      Job job(round);
      job.Break();
      const std::vector<Outcome> outcomes = job.Wait();
      for (int rank = 0; rank < round.num_processes; ++rank) {
        const Outcome& outcome = outcomes[static_cast<size_t>(rank)];
        names.insert(NameOf(outcome));
        const std::string complaint = Complaint(round, rank, outcome);
        if (complaint.empty()) continue;
        AddFailure(StrCat("CHAOS_SEED=", seed, " (", round.transport, ", ",
                          kFaultNames.at(static_cast<size_t>(round.fault)), "): process ", rank,
                          ": ", complaint),
                   Location::current());
      }
    }
    ExpectEqual(CountFds(), num_fds);
    std::string line =
        StrCat(round.transport, ", ", kFaultNames.at(static_cast<size_t>(round.fault)), ",");
    for (const std::string& name : names) line += " " + name;
    ++counts[line];
  }
  for (const auto& [line, count] : counts) {
    std::fprintf(stderr, "chaos %s: %d\n", line.c_str(), count);
  }
}

}  // namespace
}  // namespace jaxhet::testing
