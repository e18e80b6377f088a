#include "xla_plugin/transport/device_channel/lane_channel.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "xla_plugin/base/error.h"

namespace jaxhet {
namespace {

using State = ProxyTask::State;

// Proxy threads of a rank for each lane to a partner: with several partners lanes are fewer, and
// threads share them.
constexpr size_t kThreadsOfLane = 2;

// An end of a channel, for its lanes: each carries the chunks of some slots.
struct LaneEnd {
  ProxiedChannel& channel;
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

LaneChannel::LaneChannel(const ChannelSetup& setup, End end,
                         std::vector<std::shared_ptr<Lane>> lanes)
    : ProxiedChannel(setup.device, setup.piece, lanes.size()),
      end_(end),
      lanes_(std::move(lanes)) {}

void LaneChannel::SetSlots(std::byte* slots, void* device_address, size_t slot_bytes) {
  slots_ = slots;
  ProxiedChannel::SetSlots(device_address, slot_bytes);
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

}  // namespace jaxhet
