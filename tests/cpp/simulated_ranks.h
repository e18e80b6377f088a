#ifndef TESTS_CPP_SIMULATED_RANKS_H_
#define TESTS_CPP_SIMULATED_RANKS_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/cpp/host_device.h"
#include "xla_plugin/engine/device/device_rank.h"

namespace jaxhet::testing {

// Queues of streams that run only when the test says so.
class Simulation {
 public:
  // Streams of one name share a queue, as streams of a driver may share a hardware queue.
  std::unique_ptr<StreamQueue> QueueCalled(const std::string& name);
  // Runs the queues until none can continue; true if no work is left.
  bool Run();
  // Runs up to `count` pieces of work, of queues chosen at random.
  void RunSome(std::mt19937& random, int count);

 private:
  class Handle;
  struct Queue {
    std::string name;
    std::deque<StreamWork> work;
  };

  static bool RunOne(Queue& queue);

  std::mutex mutex_;  // guards the queues
  std::deque<Queue> queues_;
};

struct SimulatedOptions {
  int num_ranks = 2;
  bool is_zero_copy = false;  // operands longer than eager_bytes can be read by targets
  size_t slot_bytes = 1'000;
  size_t eager_bytes = 100;
  // Programs compute: their streams write operands before starts, and after dones they read results
  // and write over both.
  bool has_compute = false;
  // Two streams that share a queue, by name.
  std::pair<std::string, std::string> one_queue = {};
};

// All ranks' description of an exchange; see DeviceRequest.
struct SimulatedExchange {
  ExchangeKind kind = ExchangeKind::kPermute;
  std::vector<int64_t> ranks;
  size_t num_bytes = 0;  // operand's size; of an all-to-all: size of each member's block
  int64_t group_size = 0;
  bool skips_own = false;
  size_t part_bytes = 0;
  bool is_elsewhere = false;  // operands are in memory that targets can't read
};

inline constexpr std::byte kSimulatedPoison{0xFF};

// Number of dones.
size_t NumParts(const SimulatedExchange& exchange);

// A swap of ranks 0 and 1.
SimulatedExchange SwapOf(size_t num_bytes);

// Ranks on simulated devices, with a channel between any two.
class SimulatedRanks {
 public:
  // Streams of programs: of the first one, and of another.
  enum class Program { kFirst, kOther };

  explicit SimulatedRanks(const SimulatedOptions& options);
  ~SimulatedRanks();
  SimulatedRanks(const SimulatedRanks&) = delete;
  SimulatedRanks& operator=(const SimulatedRanks&) = delete;

  DeviceRank& rank(int rank) { return *nodes_.at(static_cast<size_t>(rank)).rank; }
  // By this rank. Each exchange has an index of its own.
  void Start(int rank, int64_t index, const SimulatedExchange& exchange,
             Program program = Program::kFirst);
  void Done(int rank, int64_t index, Program program = Program::kFirst);
  // Runs all streams until none can continue; true if no work is left.
  bool Run() { return simulation_.Run(); }
  void RunSome(std::mt19937& random, int count) { simulation_.RunSome(random, count); }
  // Whether the result, as the program has read it, has each byte that it should have.
  bool IsRight(int rank, int64_t index) const;
  bool IsFilledWith(int rank, int64_t index, std::byte value) const;

 private:
  class Channel;
  struct Side {
    SimulatedExchange exchange;
    std::vector<std::byte> elsewhere;
    std::span<std::byte> operand;
    std::vector<std::byte> result;
    size_t parts_left = 0;
    std::vector<std::byte> computed;  // written into the operand by the program
    std::vector<std::byte> seen;      // copy of the result, made by the program
    Event started;
  };
  struct Node {
    std::unique_ptr<DeviceRank> rank;
    std::vector<std::byte> operands;  // memory that targets can read
    size_t used = 0;
    std::map<int64_t, Side> sides;
    std::vector<Stream> programs;
  };

  void AddRank(int rank);
  void AddChannel(int source, int target);
  static std::span<std::byte> Take(Node& node, Side& side, size_t num_bytes);
  StreamHandle StreamOf(int rank, Program program) const;
  void Compute(int rank, Side& side, StreamHandle stream);
  void Use(int rank, Side& side, StreamHandle stream);

  SimulatedOptions options_;
  Simulation simulation_;
  std::deque<std::vector<std::byte>> slots_;
  std::deque<std::unique_ptr<SharedWords>> words_;
  std::deque<Node> nodes_;
};

}  // namespace jaxhet::testing

#endif  // TESTS_CPP_SIMULATED_RANKS_H_
