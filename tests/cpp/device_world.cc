#include "tests/cpp/device_world.h"

#include <algorithm>

#include "xla_plugin/device/host/host.h"

namespace jaxhet::testing {
namespace {

// Each exchange has bytes of its own.
size_t ShiftOf(int64_t index) { return static_cast<size_t>(index) * 5; }

constexpr size_t kOwnBytes = 4096;  // of each rank
constexpr size_t kMostRanks = 16;
// Of all tests of a program; a NIC's driver pins it all.
constexpr size_t kOperandBytes = size_t{500} << 20;

std::byte* AllOperands() {
  static auto* const device = OpenHostDevice({}, 0).release();
  static const auto* const memory =
      new DeviceMemory(device->Allocate(kOwnBytes * kMostRanks + kOperandBytes));
  return static_cast<std::byte*>(memory->get());
}

}  // namespace

std::string_view NameOf(std::string_view transport) {
  if (transport == "pulled") return "shm";
  return transport == "in place" ? "verbs" : transport;
}

std::span<std::byte> OperandsOf(int rank) {
  return {AllOperands() + static_cast<size_t>(rank) * kOwnBytes, kOwnBytes};
}

std::pmr::memory_resource* OperandMemory() {
  static auto* const all = new std::pmr::monotonic_buffer_resource(
      AllOperands() + kOwnBytes * kMostRanks, kOperandBytes, std::pmr::null_memory_resource());
  static auto* const pool = new std::pmr::synchronized_pool_resource(
      {.max_blocks_per_chunk = 4, .largest_required_pool_block = size_t{4} << 20}, all);
  return pool;
}

WorldOptions DeviceOptions(int num_processes, std::string_view transport) {
  WorldOptions options{.num_processes = num_processes,
                       .transports = {std::string(NameOf(transport)), "tcp"},
                       .has_operands = IsInPlace(transport)};
  options.engine.slot_bytes = kSlotBytes;
  options.engine.eager_bytes = kEagerBytes;
  return options;
}

std::vector<RingSockets> RingSocketsOf(int rank, std::vector<Ends> ends) {
  std::vector<RingSockets> sockets;
  for (size_t peer = 0; peer < ends.size(); ++peer) {
    if (std::cmp_equal(peer, rank)) continue;
    sockets.push_back({rank, static_cast<int>(peer), std::move(ends[peer].data)});
  }
  return sockets;
}

DeviceWorld::DeviceWorld(const WorldOptions& options)
    : world_(options), device_(OpenHostDevice({}, 0)) {
  std::vector<std::thread> threads;
  auto ends = ConnectAll(num_ranks(), kRingSockets);
  for (int rank = 0; rank < num_ranks(); ++rank) {
    streams_.push_back(device_->CreateStream(StreamPriority::kNormal));
    threads.emplace_back([this, rank, has_operands = options.has_operands,
                          own_ends = std::move(ends[static_cast<size_t>(rank)])]() mutable {
      const auto operands = has_operands ? OperandsOf(rank) : std::span<std::byte>{};
      world_.engine(rank).OpenDevices("host", {{rank, 0, operands}},
                                      RingSocketsOf(rank, std::move(own_ends)), kLong);
      world_.engine(rank).AddPlan(kPlan, PlanText(8));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

Part::Part(int rank, Pairs pairs, size_t num_bytes, int64_t index,
           std::pmr::memory_resource* memory)
    : operand(num_bytes, memory),
      result(num_bytes, std::byte{0xEE}),
      ranks_(std::move(pairs)),
      rank_(rank),
      index_(index) {
  const std::vector<std::byte> pattern = Pattern(rank, 0, num_bytes, ShiftOf(index));
  std::ranges::copy(pattern, operand.begin());
  request_.plan = kPlan;
  request_.index = index;
  request_.poison = kPoison;
}

Part::Part(int rank, const Group& group, size_t num_bytes, int64_t index)
    : Part(rank, group.members,
           num_bytes * (group.kind == ExchangeKind::kAllToAll ? group.members.size() : 1), index) {
  result.resize(num_bytes * group.members.size(), result.empty() ? std::byte{} : result[0]);
  request_.kind = group.kind;
  request_.skips_own = group.skips_own;
  request_.group_size = static_cast<int64_t>(group.members.size());
}

size_t Part::num_pieces() const {
  const auto piece_bytes = static_cast<size_t>(request_.part_bytes);
  return piece_bytes == 0 ? 1
                          : std::max<size_t>(1, (operand.size() + piece_bytes - 1) / piece_bytes);
}

void Part::StartOn(Engine& engine, StreamHandle stream) {
  request_.stream = stream;
  request_.ranks = ranks_;
  request_.operand = operand;
  request_.result = result;
  engine.devices().Start(0, request_);
}

void Part::DoneOn(Engine& engine, StreamHandle stream) const {
  engine.devices().Done(0, stream, request_.plan, index_);
}

bool Part::IsFrom(int source) const {
  return AreEqual(result, Pattern(source, 0, result.size(), ShiftOf(index_)));
}

bool Part::HasBlockOf(int64_t member) const {
  const auto place_of = [&](int64_t rank) {
    return static_cast<size_t>(std::ranges::find(ranks_, rank) - ranks_.begin());
  };
  const size_t block = result.size() / ranks_.size();
  const size_t begin = request_.kind == ExchangeKind::kAllToAll ? place_of(rank_) * block : 0;
  return AreEqual(std::span(result).subspan(place_of(member) * block, block),
                  Pattern(static_cast<int>(member), 0, block, ShiftOf(index_) + begin));
}

bool Part::IsFilledWith(std::byte value) const {
  return std::ranges::all_of(result, [&](std::byte byte) { return byte == value; });
}

}  // namespace jaxhet::testing
