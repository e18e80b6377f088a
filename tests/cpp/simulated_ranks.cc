#include "tests/cpp/simulated_ranks.h"

#include <algorithm>
#include <iterator>

#include "tests/cpp/world.h"
#include "xla_plugin/base/error.h"
#include "xla_plugin/base/strings.h"

namespace jaxhet::testing {
namespace {

constexpr size_t kBytesOfRank = size_t{4} << 20;  // operands
constexpr std::byte kUnset{0xEE};

size_t NumMembers(const SimulatedExchange& exchange) {
  return exchange.kind == ExchangeKind::kPermute ? 1 : static_cast<size_t>(exchange.group_size);
}

std::vector<std::byte> OperandOf(int rank, int64_t index, const SimulatedExchange& exchange) {
  const size_t blocks = exchange.kind == ExchangeKind::kAllToAll ? NumMembers(exchange) : 1;
  return Pattern(rank, 0, exchange.num_bytes * blocks, static_cast<size_t>(index) * 5);
}

// By the definition of each exchange (ExchangeRequest).
std::vector<std::byte> ResultOf(int rank, int64_t index, const SimulatedExchange& exchange) {
  std::vector<std::byte> result(exchange.num_bytes * NumMembers(exchange), kUnset);
  if (exchange.kind == ExchangeKind::kPermute) {
    std::ranges::fill(result, std::byte{0});
    for (size_t i = 0; i < exchange.ranks.size(); i += 2) {
      if (exchange.ranks[i + 1] != rank) continue;
      result = OperandOf(static_cast<int>(exchange.ranks[i]), index, exchange);
    }
    return result;
  }
  const std::vector<int> group = GroupOf(exchange.ranks, exchange.group_size, rank);
  const auto own = static_cast<size_t>(std::ranges::find(group, rank) - group.begin());
  const bool is_gather = exchange.kind == ExchangeKind::kAllGather;
  for (size_t i = 0; i < group.size(); ++i) {
    if (i == own && exchange.skips_own && group.size() > 1) continue;
    const std::vector<std::byte> operand = OperandOf(group[i], index, exchange);
    const size_t begin = is_gather ? 0 : own * exchange.num_bytes;
    std::copy_n(operand.begin() + static_cast<ptrdiff_t>(begin), exchange.num_bytes,
                result.begin() + static_cast<ptrdiff_t>(i * exchange.num_bytes));
  }
  return result;
}

}  // namespace

size_t NumParts(const SimulatedExchange& exchange) {
  if (exchange.part_bytes == 0 || exchange.part_bytes >= exchange.num_bytes) return 1;
  return (exchange.num_bytes + exchange.part_bytes - 1) / exchange.part_bytes;
}

SimulatedExchange SwapOf(size_t num_bytes) {
  SimulatedExchange exchange;
  exchange.ranks = {0, 1, 1, 0};
  exchange.num_bytes = num_bytes;
  return exchange;
}

class Simulation::Handle final : public StreamQueue {
 public:
  Handle(Simulation& simulation, std::deque<StreamWork>& work)
      : simulation_(simulation), work_(work) {}
  ~Handle() override {
    const std::lock_guard lock(simulation_.mutex_);
    work_.clear();
  }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  void Add(std::vector<StreamWork> work) override {
    const std::lock_guard lock(simulation_.mutex_);
    std::ranges::move(work, std::back_inserter(work_));
  }
  bool IsIdle() override {
    simulation_.Run();
    const std::lock_guard lock(simulation_.mutex_);
    return work_.empty();
  }
  void Synchronize() override { simulation_.Run(); }

 private:
  Simulation& simulation_;
  std::deque<StreamWork>& work_;
};

std::unique_ptr<StreamQueue> Simulation::QueueCalled(const std::string& name) {
  const std::lock_guard lock(mutex_);
  const auto found = std::ranges::find(queues_, name, &Queue::name);
  Queue& queue = found == queues_.end() ? queues_.emplace_back(Queue{name, {}}) : *found;
  return std::make_unique<Handle>(*this, queue.work);
}

bool Simulation::RunOne(Queue& queue) {
  if (queue.work.empty() || !queue.work.front().run()) return false;
  queue.work.pop_front();
  return true;
}

bool Simulation::Run() {
  const std::lock_guard lock(mutex_);
  bool moved = true;
  while (moved) {
    moved = false;
    for (Queue& queue : queues_) {
      while (RunOne(queue)) moved = true;
    }
  }
  return std::ranges::all_of(queues_, [](const Queue& queue) { return queue.work.empty(); });
}

void Simulation::RunSome(std::mt19937& random, int count) {
  const std::lock_guard lock(mutex_);
  for (int i = 0; i < count; ++i) RunOne(queues_.at(random() % queues_.size()));
}

// Both ends see the same words and slots.
class SimulatedRanks::Channel final : public DeviceChannel {
 public:
  Channel(const SimulatedOptions& options, SharedWords& words, std::byte* slots,
          std::span<std::byte> operands)
      : operands_(operands) {
    SetWords(words, &words);
    SetSlots(slots, options.slot_bytes);
  }

  bool is_shared() const override { return true; }
  std::optional<uint64_t> PlaceOf(std::span<const std::byte> operand) const override {
    const AddressRange range{.base = operands_.data(), .num_bytes = operands_.size()};
    return range.OffsetOf(operand);
  }
  const std::byte* At(uint64_t place, size_t num_bytes) const override {
    return operands_.subspan(place, num_bytes).data();
  }

 private:
  std::span<std::byte> operands_;  // the source's
};

SimulatedRanks::SimulatedRanks(const SimulatedOptions& options) : options_(options) {
  for (int rank = 0; rank < options.num_ranks; ++rank) AddRank(rank);
  for (int source = 0; source < options.num_ranks; ++source) {
    for (int target = 0; target < options.num_ranks; ++target) {
      if (source != target) AddChannel(source, target);
    }
  }
}

// Ranks end before the memory that their channels are in.
SimulatedRanks::~SimulatedRanks() {
  for (Node& node : nodes_) {
    for (auto& [index, side] : node.sides) side.started = {};
    node.programs.clear();
    node.rank.reset();
  }
}

void SimulatedRanks::AddRank(int rank) {
  std::vector<std::string> streams = {"rescue",   "send0", "send1",   "receive0", "receive1",
                                      "announce", "done",  "program", "other"};
  std::ranges::replace(streams, options_.one_queue.second, options_.one_queue.first);
  auto owned =
      OpenHostDevice([this, rank, streams = std::move(streams), next = size_t{0}]() mutable {
        return simulation_.QueueCalled(StrCat(rank, " ", streams.at(next++)));
      });
  Device& device = *owned;
  Node& node = nodes_.emplace_back();
  node.rank = std::make_unique<DeviceRank>(rank, std::move(owned), options_.eager_bytes);
  node.operands.resize(kBytesOfRank);
  for (int i = 0; i < 2; ++i) {
    node.programs.push_back(device.CreateStream(StreamPriority::kNormal));
  }
}

void SimulatedRanks::AddChannel(int source, int target) {
  SharedWords& shared = *words_.emplace_back(std::make_unique<SharedWords>());
  shared.words.intact.value = kOpen;
  if (options_.is_zero_copy) shared.words.pull_bytes = options_.eager_bytes + 1;
  auto& slots = slots_.emplace_back(kChannelSlots * options_.slot_bytes);
  Node& from = nodes_.at(static_cast<size_t>(source));
  const auto end = [&] {
    auto channel = std::make_unique<RankChannel>();
    channel->end = std::make_unique<Channel>(options_, shared, slots.data(), from.operands);
    channel->transport = "simulated";
    return channel;
  };
  rank(source).channels().Add(target, false, end());
  rank(target).channels().Add(source, true, end());
}

std::span<std::byte> SimulatedRanks::Take(Node& node, Side& side, size_t num_bytes) {
  if (side.exchange.is_elsewhere) {
    side.elsewhere.resize(num_bytes);
    return side.elsewhere;
  }
  if (node.used + num_bytes > node.operands.size()) node.used = 0;
  const auto taken = std::span(node.operands).subspan(node.used, num_bytes);
  node.used += num_bytes;
  return taken;
}

StreamHandle SimulatedRanks::StreamOf(int rank, Program program) const {
  return nodes_.at(static_cast<size_t>(rank)).programs.at(program == Program::kFirst ? 0 : 1).get();
}

void SimulatedRanks::Start(int rank, int64_t index, const SimulatedExchange& exchange,
                           Program program) {
  Node& node = nodes_.at(static_cast<size_t>(rank));
  Side& side = node.sides[index];
  side.exchange = exchange;
  side.parts_left = NumParts(exchange);
  side.computed = OperandOf(rank, index, exchange);
  side.operand = Take(node, side, side.computed.size());
  side.result.assign(exchange.num_bytes * NumMembers(exchange), kUnset);
  Compute(rank, side, StreamOf(rank, program));
  DeviceRequest request;
  request.stream = StreamOf(rank, program);
  request.kind = exchange.kind;
  request.plan = kPlan;
  request.index = index;
  request.rank = rank;
  if (exchange.kind == ExchangeKind::kPermute) {
    request.pairs = PairsOf(exchange.ranks);
  } else {
    request.group = GroupOf(exchange.ranks, exchange.group_size, rank);
    request.group_size = static_cast<size_t>(exchange.group_size);
  }
  request.skips_own = exchange.skips_own;
  request.part_bytes = exchange.part_bytes;
  request.operand = side.operand;
  request.result = side.result;
  request.poison = kSimulatedPoison;
  if (nodes_[static_cast<size_t>(rank)].rank->Start(request)) {
    Throw(ErrorCode::kPlanMismatch, "rank ", rank, " has started another exchange than its peer");
  }
  if (!options_.has_compute) return;
  Device& device = this->rank(rank).device();
  side.started = device.CreateEvent();
  device.Record(side.started.get(), request.stream);
}

void SimulatedRanks::Compute(int rank, Side& side, StreamHandle stream) {
  if (!options_.has_compute) {
    std::ranges::copy(side.computed, side.operand.begin());
    return;
  }
  Device& device = this->rank(rank).device();
  device.Copy(stream, side.operand.data(), side.computed.data(), side.computed.size());
}

void SimulatedRanks::Done(int rank, int64_t index, Program program) {
  Side& side = nodes_.at(static_cast<size_t>(rank)).sides.at(index);
  auto* const stream = StreamOf(rank, program);
  // XLA does the same between two streams.
  if (options_.has_compute) this->rank(rank).device().WaitEvent(stream, side.started.get());
  this->rank(rank).Done(stream, kPlan, index);
  if (--side.parts_left == 0 && options_.has_compute) Use(rank, side, stream);
}

void SimulatedRanks::Use(int rank, Side& side, StreamHandle stream) {
  Device& device = this->rank(rank).device();
  side.seen.resize(side.result.size());
  device.Copy(stream, side.seen.data(), side.result.data(), side.result.size());
  device.Fill(stream, side.result.data(), kUnset, side.result.size());
  device.Fill(stream, side.operand.data(), kUnset, side.operand.size());
}

bool SimulatedRanks::IsRight(int rank, int64_t index) const {
  const Side& side = nodes_.at(static_cast<size_t>(rank)).sides.at(index);
  const std::vector<std::byte>& result = options_.has_compute ? side.seen : side.result;
  return AreEqual(result, ResultOf(rank, index, side.exchange));
}

bool SimulatedRanks::IsFilledWith(int rank, int64_t index, std::byte value) const {
  const Side& side = nodes_.at(static_cast<size_t>(rank)).sides.at(index);
  return std::ranges::all_of(side.result, [&](std::byte byte) { return byte == value; });
}

}  // namespace jaxhet::testing
