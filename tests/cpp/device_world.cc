#include "tests/cpp/device_world.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <iterator>

#include "tests/cpp/host_device.h"

namespace jaxhet::testing {
namespace {

// Each exchange has bytes of its own.
size_t ShiftOf(int64_t index) { return static_cast<size_t>(index) * 5; }

constexpr size_t kOwnBytes = 4096;  // operand memory of each rank
constexpr size_t kMostRanks = 16;
// Operands of all tests of a program; a NIC's driver pins all of this memory.
constexpr size_t kOperandBytes = size_t{500} << 20;

std::byte* AllOperands() {
  static auto* const device = OpenHostDevice().release();
  static const auto* const memory =
      new DeviceMemory(device->Allocate(kOwnBytes * kMostRanks + kOperandBytes));
  return static_cast<std::byte*>(memory->get());
}

const Vendor& TestVendor() {
  static const char* const name = std::getenv("TEST_VENDOR");
  return TestVendorOf(name == nullptr ? "host" : name);
}

// A vendor as CONTRIBUTING says: a row with functions that list and open its devices.
constexpr Vendor kOtherVendor = {
    "other",
    {},
    [](Vendor::Libraries libraries) { return HostVendor().list(libraries); },
    [](Vendor::Libraries libraries, int ordinal) { return HostVendor().open(libraries, ordinal); }};

bool IsOnHost() { return &TestVendor() == &HostVendor(); }

std::unique_ptr<Device> OpenTestDevice(int rank) {
  const Vendor& vendor = TestVendor();
  static const auto num_devices = static_cast<int>(vendor.list(vendor.libraries).size());
  return vendor.open(vendor.libraries, rank % num_devices);
}

// A rank's memory on a device that is not the host. Nothing is given back: a driver that frees
// memory waits for all streams.
class Arena {
 public:
  static Arena& Of(int rank) {
    static auto* const arenas = new std::array<std::atomic<Arena*>, kMostRanks>{};
    std::atomic<Arena*>& arena = arenas->at(static_cast<size_t>(rank));
    if (arena == nullptr) arena = new Arena(rank);
    return *arena;
  }

  Device& device() { return *device_; }
  std::span<std::byte> Take(size_t num_bytes) {
    constexpr size_t kAlignment = 256;
    const size_t begin = used_.fetch_add((num_bytes + kAlignment) / kAlignment * kAlignment);
    if (begin + num_bytes > kArenaBytes) Throw(ErrorCode::kUsage, "the test's memory is used up");
    return {static_cast<std::byte*>(memory_.get()) + begin, num_bytes};
  }
  void Copy(void* to, const void* from, size_t num_bytes) {
    device_->Copy(stream_.get(), to, from, num_bytes);
    device_->Synchronize(stream_.get());
  }

 private:
  static constexpr size_t kArenaBytes = size_t{4} << 30;

  explicit Arena(int rank) : device_(OpenTestDevice(rank)) {}

  std::unique_ptr<Device> device_;
  Stream stream_ = device_->CreateStream(StreamPriority::kNormal);
  DeviceMemory memory_ = device_->Allocate(kArenaBytes);
  std::atomic<size_t> used_ = 0;
};

std::vector<ChannelPair> LaterOf(const WorldOptions& options, int rank) {
  std::vector<ChannelPair> own;
  std::ranges::copy_if(options.later, std::back_inserter(own),
                       [&](const ChannelPair& pair) { return pair.rank == rank; });
  return own;
}

int OrdinalOf(int rank) { return IsOnHost() ? 0 : Arena::Of(rank).device().info().ordinal; }

}  // namespace

const DeviceTransport& DeviceTransportOf(std::string_view name) {
  const auto transports = DeviceTransports();
  const auto found = std::ranges::find(transports, name, &DeviceTransport::name);
  if (found != transports.end()) return *found;
  Throw(ErrorCode::kTransport, "no transport between devices is called '", name, "'");
}

std::vector<std::string_view> TestedTransports() {
  if (IsOnHost()) return {"host", "pulled", "verbs", "socket"};
  return {"host", "verbs", "socket"};
}

std::string NameOfParam(const ::testing::TestParamInfo<std::string_view>& info) {
  std::string name(info.param);
  std::ranges::replace(name, ' ', '_');
  return name;
}

std::string_view NameOf(std::string_view transport) {
  if (transport == "pulled") return "host";
  return transport == "sealed" ? "socket" : transport;
}

std::span<std::byte> OperandsOf(int rank) {
  if (!IsOnHost()) return Arena::Of(rank).Take(kOwnBytes);
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
                       .transports = {std::string(NameOf(transport)), "socket"},
                       .moves_host_memory = false,
                       .has_operands = transport == "pulled"};
  options.engine.slot_bytes = kSlotBytes;
  options.engine.eager_bytes = kEagerBytes;
  if (transport == "sealed") options.engine.encryption = "full";
  return options;
}

std::vector<ChannelSockets> ChannelSocketsOf(int rank, std::vector<Ends> ends) {
  std::vector<ChannelSockets> sockets;
  for (size_t peer = 0; peer < ends.size(); ++peer) {
    if (std::cmp_equal(peer, rank)) continue;
    const size_t num_sockets = ends[peer].data.size();
    sockets.push_back({.rank = rank,
                       .peer_rank = static_cast<int>(peer),
                       .num_lanes = kLanes,
                       .sockets = std::move(ends[peer].data),
                       .keys = TestKeys(rank, static_cast<int>(peer), num_sockets)});
  }
  return sockets;
}

DeviceWorld::DeviceWorld(const WorldOptions& options) : world_(options) {
  std::vector<std::thread> threads;
  auto ends = ConnectAll(num_ranks(), kChannelSockets);
  if (options.chunk_sockets) {
    auto pairs = options.chunk_sockets();
    const size_t per_lane = pairs.size() / kLanes;
    std::vector<Fd>& of_zero = ends[0][1].data;
    std::vector<Fd>& of_one = ends[1][0].data;
    of_zero.clear();
    of_one.clear();
    for (size_t i = 0; i < pairs.size(); ++i) {
      if (i % per_lane == 0) {
        auto [zero, one] = ConnectedPair();
        of_zero.push_back(std::move(zero));
        of_one.push_back(std::move(one));
      }
      of_zero.push_back(std::move(pairs[i].first));
      of_one.push_back(std::move(pairs[i].second));
    }
  }
  std::vector<std::vector<ChannelSockets>> sockets;
  for (int rank = 0; rank < num_ranks(); ++rank) {
    auto& early = sockets.emplace_back();
    for (ChannelSockets& entry :
         ChannelSocketsOf(rank, std::move(ends[static_cast<size_t>(rank)]))) {
      const ChannelPair pair{entry.rank, entry.peer_rank};
      if (std::ranges::count(options.later, pair) == 0) {
        early.push_back(std::move(entry));
      } else {
        later_[{pair.rank, pair.peer_rank}] = std::move(entry);
      }
    }
  }
  for (int rank = 0; rank < num_ranks(); ++rank) {
    devices_.push_back(OpenTestDevice(rank));
    streams_.push_back(devices_.back()->CreateStream(StreamPriority::kNormal));
    const Vendor& vendor = options.has_two_vendors && rank == 1 ? kOtherVendor : TestVendor();
    threads.emplace_back([this, rank, &vendor, has_operands = options.has_operands,
                          ordinal = devices_.back()->info().ordinal, later = LaterOf(options, rank),
                          own = std::move(sockets[static_cast<size_t>(rank)])]() mutable {
      const auto operands = has_operands ? OperandsOf(rank) : std::span<std::byte>{};
      world_.engine(rank).OpenDevices(vendor, {{rank, ordinal, operands}}, std::move(own), kLong,
                                      later);
      world_.engine(rank).AddPlan(kPlan, PlanText(8));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void DeviceWorld::OpenLater(int rank, int peer_rank, std::chrono::milliseconds timeout) {
  std::vector<ChannelSockets> sockets;
  sockets.push_back(std::move(later_.at({rank, peer_rank})));
  engine(rank).OpenChannels({{rank, peer_rank}}, std::move(sockets), timeout);
}

Side::Side(int rank, Pairs pairs, size_t num_bytes, int64_t index,
           std::pmr::memory_resource* memory)
    : operand(num_bytes, memory),
      result(num_bytes, std::byte{0xEE}),
      ranks_(std::move(pairs)),
      rank_(rank),
      index_(index) {
  const std::vector<std::byte> pattern = Pattern(rank, 0, num_bytes, ShiftOf(index));
  std::ranges::copy(pattern, operand.begin());
  request_.rank = rank;
  request_.kind = ExchangeKind::kPermute;
  request_.plan = kPlan;
  request_.index = index;
  request_.poison = kPoison;
  if (!IsOnHost()) UseDeviceMemory();
}

Side::Side(int rank, const Group& group, size_t num_bytes, int64_t index)
    : Side(rank, group.members,
           num_bytes * (group.kind == ExchangeKind::kAllToAll ? group.members.size() : 1), index) {
  result.resize(num_bytes * group.members.size(), result.empty() ? std::byte{} : result[0]);
  request_.kind = group.kind;
  request_.skips_own = group.skips_own;
  request_.group_size = group.members.size();
  request_.group = GroupOf(group.members, std::ssize(group.members), rank);
  if (!IsOnHost()) UseDeviceMemory();
}

void Side::UseDeviceMemory() {
  Arena& arena = Arena::Of(rank_);
  device_memory_ = {arena.Take(operand.size()), arena.Take(result.size())};
}

// Copies the host's operands to the device.
void Side::Upload() const {
  Arena& arena = Arena::Of(rank_);
  arena.Copy(device_memory_->operand.data(), operand.data(), operand.size());
  arena.Copy(device_memory_->result.data(), result.data(), result.size());
}

std::vector<std::byte> Side::Result() const {
  std::vector<std::byte> bytes = result;
  if (device_memory_) {
    Arena::Of(rank_).Copy(bytes.data(), device_memory_->result.data(), bytes.size());
  }
  return bytes;
}

size_t Side::num_parts() const {
  const size_t part_bytes = request_.part_bytes;
  return part_bytes == 0 ? 1 : std::max<size_t>(1, (operand.size() + part_bytes - 1) / part_bytes);
}

void Side::StartOn(Engine& engine, StreamHandle stream) {
  request_.stream = stream;
  if (request_.kind == ExchangeKind::kPermute) request_.pairs = PairsOf(ranks_);
  if (device_memory_) Upload();
  request_.operand = device_memory_ ? device_memory_->operand : std::span(operand);
  request_.result = device_memory_ ? device_memory_->result : std::span(result);
  engine.devices()->Start(OrdinalOf(rank_), request_);
}

void Side::DoneOn(Engine& engine, StreamHandle stream) const {
  DeviceRequest request = request_;
  request.stream = stream;
  engine.devices()->Done(OrdinalOf(rank_), request);
}

bool Side::IsFrom(int source) const {
  return AreEqual(Result(), Pattern(source, 0, result.size(), ShiftOf(index_)));
}

bool Side::HasBlockOf(int64_t member) const {
  const auto place_of = [&](int64_t rank) {
    return static_cast<size_t>(std::ranges::find(ranks_, rank) - ranks_.begin());
  };
  const size_t block = result.size() / ranks_.size();
  const size_t begin = request_.kind == ExchangeKind::kAllToAll ? place_of(rank_) * block : 0;
  const std::vector<std::byte> bytes = Result();
  return AreEqual(std::span(bytes).subspan(place_of(member) * block, block),
                  Pattern(static_cast<int>(member), 0, block, ShiftOf(index_) + begin));
}

bool Side::IsFilledWith(std::byte value) const {
  return std::ranges::all_of(Result(), [&](std::byte byte) { return byte == value; });
}

void RunSides(DeviceWorld& world, std::deque<Side>& sides, const std::function<void()>& meanwhile) {
  for (Side& side : sides) side.Start(world);
  if (meanwhile) meanwhile();
  for (const Side& side : sides) side.Done(world);
  for (const Side& side : sides) EXPECT_TRUE(world.IsIdleWithin(side.rank(), kLong));
}

void ExpectSwap(DeviceWorld& world, size_t num_bytes, int64_t index,
                const std::function<void()>& meanwhile, std::pmr::memory_resource* memory) {
  std::deque<Side> sides;
  for (const int rank : {0, 1}) sides.emplace_back(rank, SwapPairs(), num_bytes, index, memory);
  RunSides(world, sides, meanwhile);
  EXPECT_TRUE(sides[0].IsFrom(1) && sides[1].IsFrom(0));
}

}  // namespace jaxhet::testing
