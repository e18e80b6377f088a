#ifndef TESTS_CPP_WORLD_H_
#define TESTS_CPP_WORLD_H_

#include <sys/types.h>

#include <array>
#include <chrono>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "xla_plugin/engine/engine.h"

namespace jaxhet::testing {

// Both ends of a TCP connection over the loopback. Each path has an address of its own; there are
// four.
std::pair<Fd, Fd> ConnectedPair(size_t path = 0);

// The ends of a job's sockets: ends[a][b] is what process a needs to talk to b.
struct Ends {
  Fd control;
  std::vector<Fd> data;
};
// Data socket i is of path i % num_paths.
std::vector<std::vector<Ends>> ConnectAll(int num_processes, int num_data = 2,
                                          size_t num_paths = 1);

// Options of the tests: smaller chunks and shorter waits than a job has.
verbs::Options NicOptions(int64_t depth = 8);
Options EngineOptions();

struct WorldOptions {
  int num_processes = 2;
  int ranks_per_process = 1;
  std::vector<std::string> transports = {"socket"};
  bool moves_host_memory = true;  // else processes connect only control
  bool has_operands = false;      // devices' operands are in memory that others can reach
  // Connects two ranks' data sockets for chunks; empty: over the loopback.
  std::function<std::vector<std::pair<Fd, Fd>>()> chunk_sockets = {};
  bool has_two_vendors = false;         // the devices of rank 1 have another vendor's name
  std::vector<ChannelPair> later = {};  // both ways: without device channels at the start
  Options engine = EngineOptions();
};

// With a short timeout for peers that are silent.
inline constexpr int64_t kFaultTimeoutMs = 1'000;
WorldOptions FaultOptions(const std::string& transport);

std::vector<RankInfo> RanksOf(const WorldOptions& options);
// Keys of `num_connections` connections, for the end of process or rank `own`.
std::vector<SealKeys> TestKeys(int own, int peer, size_t num_connections);
PeerSpec SpecOf(int peer, const WorldOptions& options, Ends ends);  // without keys
std::unique_ptr<Engine> MakeEngine(int process, const WorldOptions& options,
                                   std::vector<Ends> ends);
inline constexpr std::chrono::milliseconds kLong{20'000};
// The plan that the worlds register: lines "line 0<TAB>op 0" and so on.
inline constexpr int64_t kPlan = 7;
std::string PlanText(int num_lines, std::string_view changed_line = {});
// Joins the peer of an engine that has no thread, of process 0; returns the objects to poll.
std::set<Pollable*> JoinPeer(ProgressEngine& progress, PeerSpec spec);
// Connects an engine and names its ranks and plan; World does so with each.
void SetUpEngine(Engine& engine, const WorldOptions& options);

// A job whose processes are engines of this process.
class World {
 public:
  // `ends`: sockets of all processes, if not ConnectAll()'s.
  explicit World(WorldOptions options, std::vector<std::vector<Ends>> ends = {});
  ~World();

  Engine& engine(int process) { return *engines_.at(static_cast<size_t>(process)); }
  Engine& EngineOf(int rank) { return engine(rank / options_.ranks_per_process); }
  int num_ranks() const { return options_.num_processes * options_.ranks_per_process; }
  // At the same time, as jobs do.
  void CloseAll();

 private:
  WorldOptions options_;
  std::vector<std::shared_ptr<Engine>> engines_;
};

// Process 1 in a process of its own; process 0 is here.
class ForkedPeer {
 public:
  using Script = std::function<int(Engine&)>;  // exit code; the engine is set up

  ForkedPeer(const WorldOptions& options, const Script& script);
  ~ForkedPeer();
  ForkedPeer(const ForkedPeer&) = delete;
  ForkedPeer& operator=(const ForkedPeer&) = delete;

  Engine& engine() { return *engine_; }
  void Kill(int signal) const;
  int ExitCode();

 private:
  pid_t pid_;
  std::unique_ptr<Engine> engine_;
};

// A script.
int WaitForEver(Engine& engine);

// The buffers and the future of one start.
class Call {
 public:
  Call(ExchangeRequest request, const std::vector<size_t>& operand_bytes,
       const std::vector<size_t>& result_bytes);

  void StartOn(Engine& engine);
  // Null for success.
  std::optional<Error> Wait();

  std::vector<std::vector<std::byte>> operands;
  std::vector<std::vector<std::byte>> results;

 private:
  ExchangeRequest request_;
  std::promise<std::optional<Error>> promise_;
};

// An all-gather of the ranks 0 and 1.
ExchangeRequest GatherRequest(int rank, int64_t run_id = 1);
// Message by which rank 1 starts GatherRequest(1): rank 0 waits for it after GatherRequest(0).
StartInfo GatherStart(uint64_t num_bytes, uint64_t eager = 0);
std::optional<Error> Gather(Engine& engine, int rank, size_t num_bytes, int64_t run_id = 1);

// Has both ranks gather, and calls `meanwhile` once both have started. Returns the error of each
// rank; the error's text is kWrongBytes if the result is wrong.
inline constexpr std::string_view kWrongBytes = "wrong bytes";
std::array<std::optional<Error>, 2> GatherBoth(World& world, size_t num_bytes, int64_t run_id = 1,
                                               const std::function<void()>& meanwhile = {});

// The bytes from `begin` on of operand `operand` of `rank`.
std::vector<std::byte> Pattern(int rank, size_t operand, size_t num_bytes, size_t begin = 0);
// Compares by one access to each range, which is quick under TSan, too.
bool AreEqual(std::span<const std::byte> a, std::span<const std::byte> b);

}  // namespace jaxhet::testing

#endif  // TESTS_CPP_WORLD_H_
