#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cpp/device_world.h"
#include "tests/cpp/host_device.h"
#include "tests/cpp/relay.h"
#include "tests/cpp/testing.h"
#include "tests/cpp/world.h"
#include "xla_plugin/base/fd.h"
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

using std::chrono::microseconds;
using std::chrono::milliseconds;
using Random = std::mt19937_64;

enum class Fault : uint8_t {
  kNone,
  kKill,
  kStop,
  kCutControl,
  kCutData,
  kCorruptControl,  // bytes changed, repeated or dropped on the way, where they are authenticated
  kCorruptData,
};
bool IsOfConnection(Fault fault) { return fault >= Fault::kCutControl; }
bool IsCorruption(Fault fault) { return fault >= Fault::kCorruptControl; }

// Random choices of a round. A seed makes the same round everywhere.
struct ChaosRound {
  explicit ChaosRound(uint64_t its_seed);

  // Transport and encryption, as "socket auth" or "devices: socket auth".
  std::string Path() const;

  uint64_t seed;
  bool on_devices;  // ranks are devices, whose memory and streams are the host's
  std::string transport;
  std::string encryption;
  int num_processes;
  Fault fault;
  int victim;
  int other;  // at the other end of the connection
  std::chrono::microseconds delay;
  std::chrono::milliseconds stop_time;
  std::vector<size_t> sizes;  // bytes of each rank, by exchange
  Relay::Attack attack;       // a corruption, and where
  size_t place;
};

// Report of a process on its own end.
struct ChaosOutcome {
  enum class Kind : int32_t { kSilent, kRight, kError, kWrong };

  // "killed", "right" or the class of the error.
  std::string Name() const;
  std::string_view Text() const { return text.data(); }
  void Say(Kind its_kind, std::string_view its_text);

  Kind kind = Kind::kSilent;
  int32_t num_leaked_fds = 0;
  int32_t num_leaked_mappings = 0;
  std::array<char, 400> text{};
};

// The running processes of a round: forks of this one.
class ChaosJob {
 public:
  explicit ChaosJob(const ChaosRound& round);
  ChaosJob(const ChaosJob&) = delete;
  ChaosJob& operator=(const ChaosJob&) = delete;

  // Waits for the round's moment and brings its fault about.
  void Break();
  // Outcomes by rank. A process that reports nothing within `longest` is silent, and killed.
  std::vector<ChaosOutcome> Wait(std::chrono::milliseconds longest);

 private:
  const ChaosRound& round_;
  std::vector<pid_t> pids_;
  std::vector<Fd> reports_;
  Fd connection_;                 // a copy of the victim's end, for faults of a connection
  std::unique_ptr<Relay> relay_;  // in that connection, for its corruption
};

constexpr int64_t kPeerTimeoutMs = 800;
constexpr int64_t kDeadlineMs = 2'000;
constexpr int kLines = 8;  // exchanges of the plan

template <typename T, size_t kCount>
T AnyOf(const std::array<T, kCount>& values, Random& random) {
  return values[random() % kCount];
}

WorldOptions OptionsOf(const ChaosRound& round) {
  WorldOptions options{.num_processes = round.num_processes, .transports = {round.transport}};
  if (round.on_devices) options = DeviceOptions(round.num_processes, round.transport);
  options.engine.heartbeat_ms = 40;
  options.engine.peer_timeout_ms = kPeerTimeoutMs;
  options.engine.deadline_ms = options.engine.first_deadline_ms = kDeadlineMs;
  options.engine.eager_bytes = 0;
  options.engine.encryption = round.encryption;
  return options;
}

// Gathers from all ranks; false for a wrong result.
bool GatherRightly(Engine& engine, const ChaosRound& round, int rank, size_t step) {
  const size_t num_bytes = round.sizes[step];
  ExchangeRequest request = GatherRequest(rank, static_cast<int64_t>(step) + 1);
  std::vector<int> group(static_cast<size_t>(round.num_processes));
  std::iota(group.begin(), group.end(), 0);
  request.group = std::move(group);
  const size_t result_bytes = num_bytes * request.group.size();
  Call call(std::move(request), {num_bytes}, {result_bytes});
  call.StartOn(engine);
  if (const auto error = call.Wait()) throw Error(*error);
  for (int i = 0; i < round.num_processes; ++i) {
    const std::span part = std::span(call.results[0]).subspan(static_cast<size_t>(i) * num_bytes);
    if (!AreEqual(part.first(num_bytes), Pattern(i, 0, num_bytes))) return false;
  }
  return true;
}

// A rank that is a device, and what it exchanges.
class DeviceOfRank {
 public:
  DeviceOfRank(Engine& engine, const ChaosRound& round, int rank, std::vector<Ends> sockets)
      : engine_(engine), rank_(rank), group_{.kind = ExchangeKind::kAllGather, .members = {}} {
    for (int i = 0; i < round.num_processes; ++i) group_.members.push_back(i);
    const std::span operands =
        OptionsOf(round).has_operands ? OperandsOf(rank) : std::span<std::byte>{};
    engine.OpenDevices(HostVendor(), {{rank, 0, operands}},
                       ChannelSocketsOf(rank, std::move(sockets)), milliseconds(kDeadlineMs));
  }

  // Gathers from all ranks; false for a wrong result. A failure may be known later than a result
  // that lacks bytes.
  bool GatherRightly(size_t num_bytes, size_t step) {
    Side& side = sides_.emplace_back(rank_, group_, num_bytes, static_cast<int64_t>(step % kLines));
    side.StartOn(engine_, stream_.get());
    side.DoneOn(engine_, stream_.get());
    device_->Synchronize(stream_.get());
    if (side.HasAllBlocks()) return true;
    if (const auto error = engine_.WaitFailure(milliseconds(kDeadlineMs))) throw Error(*error);
    return false;
  }

 private:
  Engine& engine_;
  int rank_;
  Group group_;
  std::unique_ptr<Device> device_ = OpenHostDevice();
  std::deque<Side> sides_;  // streams may use them until the engine is closed
  Stream stream_ = device_->CreateStream(StreamPriority::kNormal);
};

// The sockets of device channels out of the ends of all sockets; control stays.
std::vector<Ends> TakeChannelSockets(std::vector<Ends>& ends) {
  std::vector<Ends> taken(ends.size());
  for (size_t i = 0; i < ends.size(); ++i) taken[i].data = std::exchange(ends[i].data, {});
  return taken;
}

void RunExchanges(const ChaosRound& round, int rank, std::vector<Ends> ends,
                  ChaosOutcome& outcome) {
  const WorldOptions options = OptionsOf(round);
  std::vector<Ends> channels;
  if (round.on_devices) channels = TakeChannelSockets(ends);
  const auto engine = MakeEngine(rank, options, std::move(ends));
  std::optional<DeviceOfRank> device;
  try {
    engine->Connect(milliseconds(kDeadlineMs));
    engine->SetRanks(RanksOf(options));
    if (round.on_devices) device.emplace(*engine, round, rank, std::move(channels));
    engine->AddPlan(kPlan, PlanText(kLines));
    outcome.Say(ChaosOutcome::Kind::kRight, "");
    for (size_t step = 0; step < round.sizes.size(); ++step) {
      const bool is_right = device ? device->GatherRightly(round.sizes[step], step)
                                   : GatherRightly(*engine, round, rank, step);
      if (is_right) continue;
      outcome.Say(ChaosOutcome::Kind::kWrong, StrCat("exchange ", step));
      break;
    }
  } catch (const Error& error) {
    outcome.Say(ChaosOutcome::Kind::kError, error.what());
  }
  engine->Close(milliseconds(kDeadlineMs));
}

// The memory of all operands, which is the process's own; returns the descriptors that it has.
int32_t OpenOperands() {
  const int32_t before = CountFds();
  OperandMemory();
  return CountFds() - before;
}

// A process of the job. It has no other files than these and those that its parent began with.
[[noreturn]] void BeProcess(const ChaosRound& round, int rank, std::vector<Ends> ends,
                            int num_fds_before, const Fd& report) {
  if (std::freopen("/dev/null", "w", stderr) == nullptr) _exit(1);  // errors are reported
  ChaosOutcome outcome;
  if (round.on_devices) num_fds_before += OpenOperands();
  const int32_t num_mappings_before = CountMappings();
  RunExchanges(round, rank, std::move(ends), outcome);
  outcome.num_leaked_fds = CountFds() - num_fds_before;
  outcome.num_leaked_mappings = CountMappings() - num_mappings_before;
  _exit(write(report.get(), &outcome, sizeof outcome) == sizeof outcome ? 0 : 1);
}

// The end that `process` has of the connection that the fault breaks.
Fd& EndOf(const ChaosRound& round, std::vector<std::vector<Ends>>& ends, int process, int peer) {
  Ends& chosen = ends[static_cast<size_t>(process)][static_cast<size_t>(peer)];
  const bool is_data = round.fault == Fault::kCutData || round.fault == Fault::kCorruptData;
  return is_data ? chosen.data[round.seed % chosen.data.size()] : chosen.control;
}

// Splits that connection in two; returns the inner ends, for a relay.
std::pair<Fd, Fd> RelayedEnds(const ChaosRound& round, std::vector<std::vector<Ends>>& ends) {
  auto [outer, inner] = ConnectedPair();
  Fd& replaced = EndOf(round, ends, round.other, round.victim);
  return {std::exchange(replaced, std::move(outer)), std::move(inner)};
}

ChaosOutcome ReadUntil(const Fd& report, Time limit) {
  const auto left = std::chrono::ceil<milliseconds>(limit - Clock::now());
  pollfd polled{.fd = report.get(), .events = POLLIN, .revents = 0};
  ChaosOutcome outcome;
  const auto timeout_ms = static_cast<int>(std::max<int64_t>(left.count(), 0));
  if (poll(&polled, 1, timeout_ms) <= 0) {
    outcome.Say(ChaosOutcome::Kind::kSilent, "it hangs");
  } else if (read(report.get(), &outcome, sizeof outcome) != sizeof outcome) {
    outcome.Say(ChaosOutcome::Kind::kSilent, "it has crashed");
  }
  return outcome;
}

std::string_view NameOf(Fault fault) {
  constexpr std::array<std::string_view, 7> kNames = {
      "none", "kill", "stop", "cut control", "cut data", "corrupt control", "corrupt data"};
  return kNames.at(static_cast<size_t>(fault));
}

ChaosRound::ChaosRound(uint64_t its_seed) : seed(its_seed) {
  Random random(seed);
  on_devices = random() % 2 == 0;
  transport = on_devices ? AnyOf(std::array{"host", "pulled", "socket", "socket"}, random)
                         : AnyOf(std::array{"process_vm", "socket", "socket"}, random);
  encryption = AnyOf(std::array{"off", "off", "auth", "full"}, random);
  num_processes = 2 + static_cast<int>(random() % 2);
  constexpr std::array kFaults = {Fault::kNone,       Fault::kKill,       Fault::kKill,
                                  Fault::kKill,       Fault::kStop,       Fault::kCutData,
                                  Fault::kCutData,    Fault::kCutControl, Fault::kCorruptControl,
                                  Fault::kCorruptData};
  fault = AnyOf(kFaults, random);
  if (IsCorruption(fault) && encryption == "off") encryption = "auth";
  victim = static_cast<int>(random() % static_cast<uint64_t>(num_processes));
  other = (victim + 1) % num_processes;
  const uint64_t latest_us =
      random() % 2 == 0 ? 12'000 : 40'000;  // in the connect phase, or in exchanges
  delay = microseconds(random() % latest_us);
  // Some wake up before the others give them up.
  stop_time = milliseconds(random() % 3 == 0 ? random() % 200 : 1'100 + random() % 200);
  constexpr std::array<size_t, 9> kSizes = {0,      1,      7,       1'000,    65'535,
                                            65'536, 65'537, 300'001, 1'048'576};
  for (uint64_t i = random() % 12 + 1; i > 0; --i) sizes.push_back(AnyOf(kSizes, random));
  constexpr std::array kAttacks = {Relay::Attack::kChange, Relay::Attack::kChange,
                                   Relay::Attack::kRepeat, Relay::Attack::kDrop};
  attack = AnyOf(kAttacks, random);
  place = random() % 4096;
}

std::string ChaosRound::Path() const {
  const std::string where = on_devices ? "devices: " : "";
  return encryption == "off" ? where + transport : StrCat(where, transport, " ", encryption);
}

std::string ChaosOutcome::Name() const {
  if (kind == Kind::kSilent) return "killed";
  if (kind == Kind::kRight) return "right";
  const std::string_view words = Text();
  const size_t begin = words.find('.') + 1;
  return std::string(words.substr(begin, words.find(':') - begin));
}

void ChaosOutcome::Say(Kind its_kind, std::string_view its_text) {
  kind = its_kind;
  text = {};
  std::memcpy(text.data(), its_text.data(), std::min(its_text.size(), text.size() - 1));
}

ChaosJob::ChaosJob(const ChaosRound& round) : round_(round) {
  std::fflush(stderr);
  const int num_data = round.on_devices ? kChannelSockets : 2;
  auto ends = ConnectAll(round.num_processes, num_data);
  std::pair<Fd, Fd> relayed;  // none, if nothing is corrupted
  if (IsCorruption(round.fault)) relayed = RelayedEnds(round, ends);
  const int num_fds = CountFds();
  const auto num_ends =
      (1 + num_data) * static_cast<int>((ends.size() - 1) * ends.size()) + (relayed.first ? 2 : 0);
  for (int rank = 0; rank < round.num_processes; ++rank) {
    std::array<int, 2> pipe_ends{};
    if (pipe2(pipe_ends.data(), O_CLOEXEC) != 0) ThrowErrno("pipe2");
    const Fd report(pipe_ends[1]);
    reports_.emplace_back(pipe_ends[0]);
    const pid_t pid = fork();
    if (pid < 0) ThrowErrno("fork");
    if (pid == 0) {
      std::vector<Ends> own = std::move(ends[static_cast<size_t>(rank)]);
      ends.clear();
      relayed = {};
      const int num_pipes = static_cast<int>(reports_.size()) + 1;
      BeProcess(round, rank, std::move(own), num_fds - num_ends + num_pipes, report);
    }
    pids_.push_back(pid);
  }
  if (relayed.first) {
    relay_ = std::make_unique<Relay>(std::move(relayed.first), std::move(relayed.second));
  } else if (IsOfConnection(round.fault)) {
    connection_ = std::move(EndOf(round, ends, round.victim, round.other));
  }
}

void ChaosJob::Break() {
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
    case Fault::kCorruptControl:
    case Fault::kCorruptData:
      relay_->Arm(round_.attack, round_.place);
      return;
    case Fault::kCutControl:
    case Fault::kCutData:
      shutdown(connection_.get(), SHUT_RDWR);
      connection_.Reset();
      return;
  }
}

std::vector<ChaosOutcome> ChaosJob::Wait(milliseconds longest) {
  const Time limit = Clock::now() + longest;
  std::vector<ChaosOutcome> outcomes;
  for (const Fd& report : reports_) outcomes.push_back(ReadUntil(report, limit));
  for (const pid_t pid : pids_) {
    if (Clock::now() > limit) kill(pid, SIGKILL);
    int status = 0;
    waitpid(pid, &status, 0);
  }
  return outcomes;
}

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
