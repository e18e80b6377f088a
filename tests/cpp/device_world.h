#ifndef TESTS_CPP_DEVICE_WORLD_H_
#define TESTS_CPP_DEVICE_WORLD_H_

#include <algorithm>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <memory_resource>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cpp/testing.h"
#include "tests/cpp/world.h"

namespace jaxhet::testing {

inline constexpr std::byte kPoison{0xFF};
inline constexpr size_t kSlotBytes = 64 << 10;
inline constexpr size_t kEagerBytes = 2'000;  // more than small exchanges here
inline constexpr int kLanes = 4;
inline constexpr int kChannelSockets = 2 * kLanes;
// Transports of the channels between the test's devices. "pulled" is host, with operands that the
// target's device can reach (not in a process of its own on GPUs).
std::vector<std::string_view> TestedTransports();
const DeviceTransport& DeviceTransportOf(std::string_view name);
// A job in which nothing happens; a test overrides what it needs.
class QuietJob : public JobView {
 public:
  std::shared_ptr<const Error> failure() const override { return nullptr; }
  void Fail(const Error& /*error*/) override {}
  void Lose(int /*peer_rank*/, std::string_view /*why*/) override {}
  bool HasLeft(int /*rank*/) override { return false; }
  void SendChannelMessage(int /*process*/, std::string /*body*/) override {}
  std::vector<ChannelMessage> TakeChannelMessages(
      const std::function<bool(const ChannelMessage&)>& /*want*/) override {
    return {};
  }
  RankFacts FactsOf(int /*rank*/, int64_t /*plan*/, int64_t /*index*/) override { return {}; }
};

// Tests with a transport as parameter, and the transport's name in the name of such a test.
class DeviceTransportsTest : public ::testing::TestWithParam<std::string_view> {};
std::string NameOfParam(const ::testing::TestParamInfo<std::string_view>& info);
// The engine's name of a test's transport; "sealed" is `socket` that encrypts.
std::string_view NameOf(std::string_view transport);

WorldOptions DeviceOptions(int num_processes, std::string_view transport = "host");

template <typename Condition>
bool IsWithin(std::chrono::milliseconds timeout, Condition condition) {
  const Time limit = Clock::now() + timeout;
  while (!condition() && Clock::now() < limit)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return condition();
}

// Sockets for the rank's channels, made from its ends of the sockets to the others: kLanes lanes.
std::vector<ChannelSockets> ChannelSocketsOf(int rank, std::vector<Ends> ends);

// Some memory of the rank's, in the allocation that all operands are in.
std::span<std::byte> OperandsOf(int rank);
// Memory in that allocation.
std::pmr::memory_resource* OperandMemory();

// A job whose ranks are devices, and a program's stream for each. The devices are the host, or
// those of the vendor in TEST_VENDOR, which ranks share if there are fewer.
class DeviceWorld {
 public:
  explicit DeviceWorld(const WorldOptions& options);

  // By the rank: opens the channels with another one that were left for later. Throws as the engine
  // does.
  void OpenLater(int rank, int peer_rank, std::chrono::milliseconds timeout = kLong);

  int num_ranks() const { return world_.num_ranks(); }
  Engine& engine(int rank) { return world_.engine(rank); }
  StreamHandle stream(int rank) const { return streams_.at(static_cast<size_t>(rank)).get(); }
  Device& device(int rank = 0) { return *devices_.at(static_cast<size_t>(rank)); }
  bool IsIdleWithin(int rank, std::chrono::milliseconds timeout) {
    return IsWithin(timeout, [&] { return device(rank).IsIdle(stream(rank)); });
  }

 private:
  World world_;
  std::map<std::pair<int, int>, ChannelSockets> later_;
  std::vector<std::unique_ptr<Device>> devices_;  // by rank
  std::deque<Stream> streams_;
};

// Sources and targets in turn.
using Pairs = std::vector<int64_t>;

inline Pairs SwapPairs() { return {0, 1, 1, 0}; }

// All members of its one group.
struct Group {
  ExchangeKind kind;
  std::vector<int64_t> members;
  bool skips_own = false;
};

// One rank's side of an exchange.
class Side {
 public:
  Side(int rank, Pairs pairs, size_t num_bytes, int64_t index = 0,
       std::pmr::memory_resource* memory = OperandMemory());
  // Side of an all-to-all with `num_bytes` for each member.
  Side(int rank, const Group& group, size_t num_bytes, int64_t index = 0);

  Side& WithPlan(int64_t plan) {
    request_.plan = plan;
    return *this;
  }
  Side& WithDeadline(std::chrono::milliseconds deadline) {
    request_.deadline_ms = deadline.count();
    return *this;
  }
  // A permute that arrives in parts of `part_bytes`, each with a Done().
  Side& InParts(size_t part_bytes) {
    request_.part_bytes = part_bytes;
    return *this;
  }
  // A start of that handle among ranks 0 and 1, or a finish.
  Side& OfHandle(int64_t handle, bool is_finish) {
    request_.handle = handle;
    request_.is_finish = is_finish;
    if (is_finish) return *this;
    request_.kind = ExchangeKind::kAllGather;
    request_.group = {0, 1};
    return *this;
  }
  int rank() const { return rank_; }
  size_t num_parts() const;
  void StartOn(Engine& engine, StreamHandle stream);
  void DoneOn(Engine& engine, StreamHandle stream) const;
  void Start(DeviceWorld& world) { StartOn(world.engine(rank_), world.stream(rank_)); }
  void Done(DeviceWorld& world) const { DoneOn(world.engine(rank_), world.stream(rank_)); }
  bool IsFrom(int source) const;
  // Whether the block of a group's result is the member's.
  bool HasBlockOf(int64_t member) const;
  bool HasAllBlocks() const {
    return std::ranges::all_of(ranks_, std::bind_front(&Side::HasBlockOf, this));
  }
  bool IsFilledWith(std::byte value) const;

  std::pmr::vector<std::byte> operand;
  std::vector<std::byte> result;  // on a host device

 private:
  struct DeviceCopies {
    std::span<std::byte> operand;
    std::span<std::byte> result;
  };

  void UseDeviceMemory();
  void Upload() const;
  std::vector<std::byte> Result() const;

  std::vector<int64_t> ranks_;
  int rank_;
  int64_t index_;
  DeviceRequest request_;
  std::optional<DeviceCopies> device_memory_;  // none on a host device
};

// Starts all sides, calls `meanwhile`, is done with all of them, and waits for their streams.
void RunSides(DeviceWorld& world, std::deque<Side>& sides,
              const std::function<void()>& meanwhile = {});
// A swap of ranks 0 and 1 whose results are right.
void ExpectSwap(DeviceWorld& world, size_t num_bytes, int64_t index = 0,
                const std::function<void()>& meanwhile = {},
                std::pmr::memory_resource* memory = OperandMemory());

}  // namespace jaxhet::testing

#endif  // TESTS_CPP_DEVICE_WORLD_H_
