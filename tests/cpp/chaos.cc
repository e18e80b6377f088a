#include "tests/cpp/chaos.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <deque>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cpp/device_world.h"
#include "tests/cpp/host_device.h"
#include "tests/cpp/testing.h"
#include "tests/cpp/world.h"

namespace jaxhet::testing {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using Random = std::mt19937_64;

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

// The end that `process` has of the connection that the fault is of.
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

}  // namespace

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

}  // namespace jaxhet::testing
