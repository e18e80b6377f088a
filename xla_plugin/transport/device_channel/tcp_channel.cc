#include "xla_plugin/transport/device_channel/tcp_channel.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <optional>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"
#include "xla_plugin/base/take.h"
#include "xla_plugin/transport/device_channel/proxied_channel.h"

namespace jaxhet {
namespace {

using State = ProxyTask::State;

struct TcpOfferInfo {
  uint64_t slot_bytes;
};

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
class Sender final : public SocketLane::Direction {
 public:
  Sender(LaneEnd end, size_t lane, size_t num_lanes)
      : end_(end),
        lane_(lane),
        num_lanes_(num_lanes),
        chunks_(end.channel.words().source, end.channel.slot_bytes()) {}

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
class Receiver final : public SocketLane::Direction {
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

void Attach(SocketLane& lane, Sender& sender) { lane.SetOutgoing(sender); }
void Attach(SocketLane& lane, Receiver& receiver) { lane.SetIncoming(receiver); }

// Offers of all lanes, each after its length.
std::string OffersOf(std::span<const std::shared_ptr<SocketLane>> lanes) {
  std::string offers;
  for (const auto& lane : lanes) {
    const std::string offer = lane->Offer();
    offers += static_cast<char>(offer.size());
    offers += offer;
  }
  return offers;
}
void AcceptOffers(std::span<const std::shared_ptr<SocketLane>> lanes, std::string_view offers) {
  for (const auto& lane : lanes) {
    const size_t num_bytes = Take<uint8_t>(offers, "the peer's offer");
    if (num_bytes > offers.size()) Throw(ErrorCode::kTransport, "the peer's offer is cut");
    lane->Accept(offers.substr(0, num_bytes));
    offers.remove_prefix(num_bytes);
  }
}

template <typename Direction>
class TcpChannel final : public ProxiedChannel {
 public:
  TcpChannel(const ChannelSetup& setup, size_t slot_bytes)
      : ProxiedChannel(setup.device, setup.lanes.size()),
        lanes_(setup.lanes.begin(), setup.lanes.end()),
        slots_memory_(setup.device.AllocatePinned(CheckedMultiply(kChannelSlots, slot_bytes))),
        launched_(words().source, slot_bytes) {
    SetSlots(setup.device.DeviceAddress(slots_memory_.get()), slot_bytes);
  }
  ~TcpChannel() override { Cut(); }

  std::vector<int> SocketFds() const override {
    std::vector<int> fds;
    for (const auto& lane : lanes_) std::ranges::copy(lane->fds(), std::back_inserter(fds));
    return fds;
  }
  std::string Answer() override { return OffersOf(lanes_); }
  void Accept(std::string_view answer) override { AcceptOffers(lanes_, answer); }
  // The sockets were authenticated; there is no memory to prove.
  void Prove(Device& /*device*/, std::span<const std::byte> /*proof*/) override {}
  bool IsProven(Device& /*device*/, std::span<const std::byte> /*proof*/) override { return true; }
  void Settle(Proxy& proxy) override {
    const LaneEnd end{*this, static_cast<std::byte*>(slots_memory_.get())};
    for (size_t i = 0; i < lanes_.size(); ++i) {
      directions_.push_back(std::make_unique<Direction>(end, i, lanes_.size()));
      Attach(*lanes_[i], *directions_[i]);
      proxy.Add(*lanes_[i]);
    }
  }
  void Launched() override {
    while (const auto chunk = launched_.Next()) {
      lanes_[SlotOf(chunk->chunk) % lanes_.size()]->Wake();
      launched_.Advance(*chunk);
    }
  }
  void Cut() override {
    if (directions_.empty()) return;  // not settled: other channels may use the lanes
    for (const auto& lane : lanes_) lane->Stop();
  }

 private:
  std::vector<std::shared_ptr<SocketLane>> lanes_;
  std::vector<std::unique_ptr<Direction>> directions_;  // one for each lane, once settled
  PinnedMemory slots_memory_;
  ChunkCounter launched_;
};

void CheckLanes(const ChannelSetup& setup) {
  if (setup.same_process) Throw(ErrorCode::kTransport, "both devices are of one process");
  if (setup.lanes.empty()) Throw(ErrorCode::kTransport, "no sockets were connected for it");
}

}  // namespace

std::pair<std::unique_ptr<DeviceChannel>, std::string> MakeTcpChannel(const ChannelSetup& setup) {
  CheckLanes(setup);
  const TcpOfferInfo info{HostSlotBytes(setup)};
  return {std::make_unique<TcpChannel<Receiver>>(setup, info.slot_bytes),
          std::string(reinterpret_cast<const char*>(&info), sizeof info) + OffersOf(setup.lanes)};
}

std::unique_ptr<DeviceChannel> OpenTcpChannel(const ChannelSetup& setup, std::string_view offer) {
  CheckLanes(setup);
  const auto info = Take<TcpOfferInfo>(offer, "the peer's offer");
  CheckSlotBytes(info.slot_bytes);
  AcceptOffers(setup.lanes, offer);
  return std::make_unique<TcpChannel<Sender>>(setup, info.slot_bytes);
}

}  // namespace jaxhet
