#include "xla_plugin/transport/device_channel/lane_channel.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <new>
#include <utility>

#include "xla_plugin/transport/device_channel/device_channel.h"
#include "xla_plugin/transport/device_channel/lane.h"

namespace jaxhet {
namespace {

using State = Lane::State;

// Proxy threads of a rank for each lane to a partner: with several partners lanes are fewer, and
// threads share them.
constexpr size_t kThreadsOfLane = 2;

// An end of a channel, for its lanes: each carries the chunks of some slots.
struct LaneEnd {
  LaneChannel& channel;
  std::byte* slots;  // for the host

  std::byte* slot(uint64_t chunk) const { return slots + SlotOf(chunk) * channel.slot_bytes(); }
};

// A chunk as a transfer: its description, and the bytes in its slot.
struct ChunkTransfer {
  DeviceChunkInfo info{};
  Transfer transfer;
};

// Sends the chunks of one lane.
class Sender final : public Lane::Direction {
 public:
  Sender(LaneEnd end, size_t lane, size_t num_lanes)
      : end_(end),
        lane_(lane),
        num_lanes_(num_lanes),
        chunks_(end.channel.source_log(), end.channel.slot_bytes()) {}

  State Begin(Connection& connection) override {
    State state = State::kIdle;
    for (auto chunk = Next(); chunk; chunk = Next()) {
      const uint32_t slot = SlotOf(chunk->chunk);
      if (!Has(end_.channel.words().tail.at(slot), GenerationOf(chunk->chunk))) {
        return std::max(state, State::kWaiting);
      }
      ChunkTransfer& sent = transfers_.at(slot);
      sent = {.info = *chunk, .transfer = {}};
      sent.transfer.send.Add(&sent.info, sizeof sent.info);
      sent.transfer.send.Add(end_.slot(chunk->chunk), chunk->num_bytes);
      sent.transfer.peer_ticket = chunk->chunk;
      connection.Begin(sent.transfer, {});
      chunks_.Advance(*chunk);
      ++num_begun_;
      state = State::kMoved;
    }
    return state;
  }

  void Moved(Transfer& transfer) override {
    if (!transfer.IsDone()) return;
    --num_begun_;
    const uint64_t chunk = transfer.peer_ticket;
    Set(end_.channel.words().head.at(SlotOf(chunk)), GenerationOf(chunk));
  }
  bool is_sending() const override { return num_begun_ > 0 || chunks_.Next(); }
  void Fail(const Error& error) override { end_.channel.Fail(error); }

 private:
  // The next chunk of this lane, if it is launched.
  std::optional<DeviceChunkInfo> Next() {
    std::optional<DeviceChunkInfo> chunk = chunks_.Next();
    while (chunk && SlotOf(chunk->chunk) % num_lanes_ != lane_) {
      chunks_.Advance(*chunk);
      chunk = chunks_.Next();
    }
    end_.channel.ComeTo(lane_, chunks_.exchange());
    return chunk;
  }

  LaneEnd end_;
  size_t lane_;
  size_t num_lanes_;
  ChunkCounter chunks_;
  std::array<ChunkTransfer, kChannelSlots> transfers_;
  size_t num_begun_ = 0;  // chunks that are not sent
};

// Receives the chunks of one lane.
class Receiver final : public Lane::Direction {
 public:
  Receiver(LaneEnd end, size_t lane, size_t num_lanes) : end_(end) {
    for (size_t slot = 0; slot < kChannelSlots; ++slot) {
      slots_.at(slot) = {.next_chunk = slot, .is_of_lane = slot % num_lanes == lane, .chunk = {}};
    }
  }

  // A later chunk may overtake the slot's next one, which is in another socket: it waits.
  bool IsReady(uint64_t chunk) override {
    if (chunk > slots_.at(SlotOf(chunk)).next_chunk) return false;
    Slot& slot = Expected(chunk);
    if (!Has(end_.channel.words().head.at(SlotOf(chunk)), GenerationOf(chunk) - 1)) return false;
    slot.chunk = {};
    slot.chunk.transfer.receive.Add(&slot.chunk.info, sizeof slot.chunk.info);
    slot.chunk.transfer.receive.Add(end_.slot(chunk), end_.channel.slot_bytes());
    slot.chunk.transfer.ticket = chunk;
    return true;
  }
  Transfer& Find(uint64_t chunk) override { return Expected(chunk).chunk.transfer; }
  void Moved(Transfer& transfer) override {
    const uint64_t chunk = transfer.ticket;
    Slot& slot = slots_.at(SlotOf(chunk));
    if (transfer.received < sizeof slot.chunk.info) return;
    const std::span<const DeviceChunkInfo, 1> sent(&slot.chunk.info, 1);
    const DeviceChunkInfo info =
        ParseDeviceChunkInfo(std::as_bytes(sent), chunk, end_.channel.slot_bytes());
    if (transfer.received < sizeof info + info.num_bytes) return;
    slot.next_chunk += kChannelSlots;
    if (!end_.channel.IsAgreed(info)) return;  // whoever looks at the logs fails the job
    Set(end_.channel.words().tail.at(SlotOf(chunk)), GenerationOf(chunk));
  }
  void Fail(const Error& error) override { end_.channel.Fail(error); }

 private:
  struct Slot {
    uint64_t next_chunk;
    bool is_of_lane;
    ChunkTransfer chunk;
  };

  Slot& Expected(uint64_t chunk) {
    Slot& slot = slots_.at(SlotOf(chunk));
    if (slot.is_of_lane && slot.next_chunk == chunk) return slot;
    Throw(ErrorCode::kTransport, "the peer sent chunk ", chunk, " in the place of chunk ",
          slot.next_chunk);
  }

  LaneEnd end_;
  std::array<Slot, kChannelSlots> slots_{};
};

}  // namespace

DeviceChunkInfo ParseDeviceChunkInfo(std::span<const std::byte, sizeof(DeviceChunkInfo)> bytes,
                                     uint64_t chunk, size_t slot_bytes) {
  DeviceChunkInfo info{};
  std::memcpy(&info, bytes.data(), bytes.size());
  if (info.chunk != chunk) {
    Throw(ErrorCode::kTransport, "the peer sent chunk ", info.chunk, " in the place of chunk ",
          chunk);
  }
  if (info.num_bytes > std::min<uint64_t>(slot_bytes, info.exchange_bytes)) {
    Throw(ErrorCode::kTransport, "the peer sent a chunk of ", info.num_bytes,
          " bytes; its slot holds ", slot_bytes, ", its exchange ", info.exchange_bytes);
  }
  return info;
}

std::optional<DeviceChunkInfo> ChunkCounter::Next() const {
  if (log_.last() < exchange_) return std::nullopt;
  const std::optional<Launch> launch = log_.Find(exchange_);
  if (!launch) Throw(ErrorCode::kTransport, "exchange ", exchange_, " was overwritten");
  const size_t chunk_bytes = ChunkBytes(launch->num_bytes, slot_bytes_);
  return DeviceChunkInfo{
      .exchange = exchange_,
      .plan = launch->plan,
      .index = launch->index,
      .exchange_bytes = launch->num_bytes,
      .chunk = chunk_,
      .num_bytes = std::min<uint64_t>(chunk_bytes, launch->num_bytes - done_bytes_)};
}

void ChunkCounter::Advance(const DeviceChunkInfo& chunk) {
  ++chunk_;
  done_bytes_ += chunk.num_bytes;
  if (done_bytes_ < chunk.exchange_bytes) return;
  done_bytes_ = 0;
  ++exchange_;
}

LaneChannel::LaneChannel(const ChannelSetup& setup, End end, size_t slot_bytes)
    : LaneChannel(setup, end, {setup.lanes.begin(), setup.lanes.end()}, slot_bytes) {
  SetSlots(piece_.slots, piece_.slots_on_device, slot_bytes);
}

LaneChannel::LaneChannel(const ChannelSetup& setup, End end,
                         std::vector<std::shared_ptr<Lane>> lanes, size_t pinned_bytes)
    : end_(end),
      memory_(setup.piece != nullptr ? PinnedMemory()
                                     : setup.device.AllocatePinned(PieceBytes(pinned_bytes))),
      piece_(setup.piece != nullptr
                 ? *setup.piece
                 : PieceAt(static_cast<std::byte*>(memory_.get()),
                           static_cast<std::byte*>(setup.device.DeviceAddress(memory_.get())),
                           pinned_bytes)),
      passed_(lanes.size()),
      lanes_(std::move(lanes)) {
  auto* const words = new (piece_.words) ChannelWords{};
  words->intact.value = kOpen;
  SetWords(*words, piece_.words_on_device, LaunchLog(*source_launches_),
           LaunchLog(*target_launches_));
}

std::string LaneChannel::Answer() {
  std::string offers;
  for (const auto& lane : lanes_) {
    const std::string offer = lane->connection().Offer();
    const auto num_bytes = CheckedCast<uint32_t>(offer.size());
    offers.append(reinterpret_cast<const char*>(&num_bytes), sizeof num_bytes).append(offer);
  }
  return offers;
}

void LaneChannel::Accept(std::string_view answer) {
  for (const auto& lane : lanes_) {
    const size_t num_bytes = Take<uint32_t>(answer, "the peer's offer");
    if (num_bytes > answer.size()) Throw(ErrorCode::kTransport, "the peer's offer is cut");
    lane->Accept(answer.substr(0, num_bytes));
    answer.remove_prefix(num_bytes);
  }
}

void LaneChannel::SetSlots(std::byte* slots, void* device_address, size_t slot_bytes) {
  slots_ = slots;
  DeviceChannel::SetSlots(device_address, slot_bytes);
  launched_ = std::make_unique<ChunkCounter>(source_log(), slot_bytes);
}

// Several lanes may use, and leave, the same path.
uint64_t LaneChannel::num_path_failures() const {
  uint64_t most = 0;
  for (const auto& lane : lanes_) most = std::max(most, lane->num_path_failures());
  return most;
}

void LaneChannel::Settle(Proxy& proxy) {
  const LaneEnd end{*this, slots_};
  for (size_t i = 0; i < lanes_.size(); ++i) {
    if (end_ == End::kSource) {
      auto sender = std::make_unique<Sender>(end, i, lanes_.size());
      lanes_[i]->SetOutgoing(*sender);
      directions_.push_back(std::move(sender));
    } else {
      auto receiver = std::make_unique<Receiver>(end, i, lanes_.size());
      lanes_[i]->SetIncoming(*receiver);
      directions_.push_back(std::move(receiver));
    }
    proxy.Add(*lanes_[i], kThreadsOfLane * lanes_.size());
  }
}

void LaneChannel::Launched() {
  while (const auto chunk = launched_->Next()) {
    lanes_[SlotOf(chunk->chunk) % lanes_.size()]->Wake();
    launched_->Advance(*chunk);
  }
}

void LaneChannel::Cut() {
  if (directions_.empty()) return;  // not settled: other channels may use the lanes
  for (const auto& lane : lanes_) lane->Stop();
}

std::optional<uint64_t> LaneChannel::Passed() const {
  return *std::ranges::min_element(passed_, {}, [](const auto& passed) { return passed.load(); });
}

std::string LaneChannel::Failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

void LaneChannel::Fail(const Error& error) {
  const std::lock_guard lock(mutex_);
  if (failure_.empty()) failure_ = error.text();
}

bool LaneChannel::IsAgreed(const DeviceChunkInfo& info) {
  const Launch launch{.plan = info.plan, .index = info.index, .num_bytes = info.exchange_bytes};
  {
    const std::lock_guard lock(publishing_);
    if (source_log().Find(info.exchange) != launch) source_log().Publish(info.exchange, launch);
  }
  const std::optional<Launch> own = target_log().Find(info.exchange);
  return !own || *own == launch;
}

}  // namespace jaxhet
