#ifndef TESTS_CPP_DEVICE_WORLD_H_
#define TESTS_CPP_DEVICE_WORLD_H_

#include <algorithm>
#include <chrono>
#include <deque>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cpp/world.h"
#include "xla_plugin/device/host/host.h"

namespace jaxhet::testing {

inline constexpr std::byte kPoison{0xFF};
inline constexpr size_t kSlotBytes = 64 << 10;

template <typename Condition>
bool IsWithin(std::chrono::milliseconds timeout, Condition condition) {
  const Time limit = Clock::now() + timeout;
  while (!condition() && Clock::now() < limit)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return condition();
}

// A job whose ranks are host devices, and a program's stream for each.
class DeviceWorld {
 public:
  explicit DeviceWorld(const WorldOptions& options)
      : world_(options), device_(OpenHostDevice({}, 0)) {
    std::vector<std::thread> threads;
    const auto sockets = Sockets();
    for (int rank = 0; rank < num_ranks(); ++rank) {
      streams_.push_back(device_->CreateStream(StreamPriority::kNormal));
      threads.emplace_back([this, rank, &sockets] {
        world_.engine(rank).OpenDevices("host", {{rank, 0}}, sockets.at(static_cast<size_t>(rank)),
                                        kLong);
        world_.engine(rank).AddPlan(kPlan, PlanText(8));
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  int num_ranks() const { return world_.num_ranks(); }
  Engine& engine(int rank) { return world_.engine(rank); }
  StreamHandle stream(int rank) const { return streams_.at(static_cast<size_t>(rank)).get(); }
  Device& device() { return *device_; }
  bool IsIdleWithin(int rank, std::chrono::milliseconds timeout) {
    return IsWithin(timeout, [&] { return device_->IsIdle(stream(rank)); });
  }

 private:
  // By rank, for every other one.
  std::vector<std::vector<RingSockets>> Sockets() const {
    std::vector<std::vector<RingSockets>> sockets(static_cast<size_t>(num_ranks()));
    auto ends = ConnectAll(num_ranks(), 3 + RingSockets::kNumMessageSockets);
    for (size_t rank = 0; rank < ends.size(); ++rank) {
      for (size_t peer = 0; peer < ends.size(); ++peer) {
        if (peer == rank) continue;
        sockets[rank].push_back(
            {static_cast<int>(rank), static_cast<int>(peer), std::move(ends[rank][peer].data)});
      }
    }
    return sockets;
  }

  World world_;
  std::unique_ptr<Device> device_;
  std::deque<Stream> streams_;
};

// Sources and targets in turn.
using Pairs = std::vector<int64_t>;

// One rank's part of an exchange.
class Part {
 public:
  Part(int rank, Pairs pairs, size_t num_bytes, int64_t index = 0)
      : operand(num_bytes),
        result(num_bytes, std::byte{0xEE}),
        pairs_(std::move(pairs)),
        rank_(rank),
        index_(index) {
    for (size_t i = 0; i < num_bytes; ++i) operand[i] = Pattern(rank, 0, i + Shift());
    request_.plan = kPlan;
    request_.index = index;
    request_.poison = kPoison;
  }

  Part& WithPlan(int64_t plan) {
    request_.plan = plan;
    return *this;
  }
  void Start(DeviceWorld& world) {
    request_.stream = world.stream(rank_);
    request_.pairs = pairs_;
    request_.operand = operand;
    request_.result = result;
    world.engine(rank_).devices().Start(0, request_);
  }
  void Done(DeviceWorld& world) const {
    world.engine(rank_).devices().Done(0, world.stream(rank_), request_.plan, index_);
  }
  bool IsFrom(int source) const {
    for (size_t i = 0; i < result.size(); ++i) {
      if (result[i] != Pattern(source, 0, i + Shift())) return false;
    }
    return true;
  }
  bool IsFilledWith(std::byte value) const {
    return std::ranges::all_of(result, [&](std::byte byte) { return byte == value; });
  }

  std::vector<std::byte> operand;
  std::vector<std::byte> result;

 private:
  size_t Shift() const { return static_cast<size_t>(index_) * 5; }

  Pairs pairs_;
  int rank_;
  int64_t index_;
  DeviceRequest request_;
};

inline Pairs SwapPairs() { return {0, 1, 1, 0}; }

}  // namespace jaxhet::testing

#endif  // TESTS_CPP_DEVICE_WORLD_H_
