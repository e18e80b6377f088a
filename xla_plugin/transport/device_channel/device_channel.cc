#include "xla_plugin/transport/device_channel/device_channel.h"

#include <algorithm>
#include <array>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"

namespace jaxhet {
namespace {

// Short enough that copies of both ends overlap, and that the sockets of a pair share 1 MiB; long
// enough that each is worth a copy.
constexpr size_t kLeastChunk = size_t{256} << 10;
constexpr size_t kChunksPerExchange = 8;

constexpr size_t kWordsBytes = 4096;  // a page, so that slots begin at one
static_assert(sizeof(ChannelWords) <= kWordsBytes);

}  // namespace

uint32_t DeviceNumber(uint64_t number) {
  if (number >= kOpen) {
    Throw(ErrorCode::kUsage,
          "this process has run out of numbers for its exchanges; run the job again from its last "
          "checkpoint");
  }
  return static_cast<uint32_t>(number);
}

void LaunchLog::Publish(uint64_t number, const Launch& launch, uint64_t place) const {
  LaunchEntry& entry = entries_[number % capacity()];
  entry.number.store(0, std::memory_order_seq_cst);
  entry.plan.store(launch.plan, std::memory_order_relaxed);
  entry.index.store(launch.index, std::memory_order_relaxed);
  entry.num_bytes.store(launch.num_bytes, std::memory_order_relaxed);
  entry.place.store(place, std::memory_order_relaxed);
  entry.number.store(number, std::memory_order_seq_cst);
  for (uint64_t last = *last_; last < number && !last_->compare_exchange_weak(last, number);) {
  }
}

std::optional<Launch> LaunchLog::Find(uint64_t number) const {
  const LaunchEntry& entry = entries_[number % capacity()];
  if (number == 0 || entry.number.load(std::memory_order_seq_cst) != number) return std::nullopt;
  return Launch{.plan = entry.plan.load(std::memory_order_relaxed),
                .index = entry.index.load(std::memory_order_relaxed),
                .num_bytes = entry.num_bytes.load(std::memory_order_relaxed)};
}

uint64_t LaunchLog::PlaceOf(uint64_t number) const {
  return entries_[number % capacity()].place.load(std::memory_order_relaxed);
}

RouteChoices::Route RouteChoices::Choose(uint64_t number, Route route) {
  std::atomic<uint64_t>& entry = entries_[number % entries_.size()];
  const uint64_t choice = 2 * number + (route == Route::kSlots ? 1 : 0);
  for (uint64_t seen = entry; seen < 2 * number && !entry.compare_exchange_weak(seen, choice);) {
  }
  return Find(number).value_or(route);
}

std::optional<RouteChoices::Route> RouteChoices::Find(uint64_t number) const {
  const uint64_t seen = entries_[number % entries_.size()];
  if (seen < 2 * number) return std::nullopt;
  return seen % 2 == 0 ? Route::kZeroCopy : Route::kSlots;
}

size_t ChunkBytes(size_t num_bytes, size_t slot_bytes) {
  constexpr size_t kAlignment = 4096;
  const size_t even = (num_bytes / kChunksPerExchange + kAlignment - 1) & ~(kAlignment - 1);
  return std::min(slot_bytes, std::max(even, kLeastChunk));
}

std::optional<uint64_t> DeviceChannel::PlaceOf(std::span<const std::byte> /*operand*/) const {
  return std::nullopt;
}

const std::byte* DeviceChannel::At(uint64_t /*place*/, size_t /*num_bytes*/) const {
  Throw(ErrorCode::kTransport,
        "the source wants an exchange pulled, which this device channel can't do");
}

void DeviceChannel::Prove(Device& device, std::span<const std::byte> proof) {
  WriteProof(device, slot(0), proof);
}

bool DeviceChannel::IsProven(Device& device, std::span<const std::byte> proof) {
  return HasProof(device, slot(0), proof);
}

size_t FairSlotBytes(size_t wanted, size_t budget, size_t num_channels) {
  const size_t fair = budget / (kChannelSlots * std::max<size_t>(1, num_channels));
  const size_t rounded = fair / kLeastSlotBytes * kLeastSlotBytes;
  return std::min(wanted, std::max(rounded, kLeastSlotBytes));
}

void CheckSlotBytes(uint64_t slot_bytes, const ArenaPiece* piece) {
  const uint64_t most = piece != nullptr ? piece->slot_bytes : kMostDeviceBytes / kChannelSlots;
  if (slot_bytes >= kLeastSlotBytes && slot_bytes <= most) return;
  Throw(ErrorCode::kTransport, "the peer offers slots of ", slot_bytes, " bytes, not of ",
        kLeastSlotBytes, " to ", most);
}

std::span<const DeviceTransport> DeviceTransports() {
  static const std::array all = {local_transport, cuda_ipc_transport, hip_ipc_transport,
                                 host_transport,  verbs_transport,    socket_transport};
  return all;
}

size_t PieceBytes(size_t slot_bytes) {
  return kWordsBytes + CheckedMultiply(kChannelSlots, slot_bytes);
}

ArenaPiece PieceAt(std::byte* host, std::byte* on_device, size_t slot_bytes) {
  return {.words = host,
          .words_on_device = on_device,
          .slots = host + kWordsBytes,
          .slots_on_device = on_device + kWordsBytes,
          .slot_bytes = slot_bytes,
          .nics = {}};
}

ChannelArena::ChannelArena(Device& device, std::span<const int> peer_ranks, size_t slot_bytes) {
  const size_t piece_bytes = PieceBytes(slot_bytes);
  const size_t num_bytes = CheckedMultiply(2 * peer_ranks.size(), piece_bytes);
  memory_ = device.AllocatePinned(num_bytes);
  auto* host = static_cast<std::byte*>(memory_.get());
  auto* on_device = static_cast<std::byte*>(device.DeviceAddress(host));
  bytes_ = {host, num_bytes};
  for (const int peer_rank : peer_ranks) {
    for (const bool is_incoming : {false, true}) {
      pieces_[{peer_rank, is_incoming}] = PieceAt(host, on_device, slot_bytes);
      host += piece_bytes;
      on_device += piece_bytes;
    }
  }
}

void ChannelArena::Register(std::vector<std::shared_ptr<verbs::Nic>> nics) {
  nics_ = std::move(nics);
  nic_memory_ = std::make_unique<verbs::NicMemory>(nics_, bytes_, verbs::kPeerWrites);
  for (auto& [key, piece] : pieces_) {
    piece.nics = nics_;
    piece.nic_memory = nic_memory_.get();
  }
}

const ArenaPiece* ChannelArena::PieceFor(int peer_rank, bool is_incoming) const {
  const auto found = pieces_.find({peer_rank, is_incoming});
  return found == pieces_.end() ? nullptr : &found->second;
}

}  // namespace jaxhet
