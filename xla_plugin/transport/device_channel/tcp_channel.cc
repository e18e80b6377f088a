#include "xla_plugin/transport/device_channel/tcp_channel.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"
#include "xla_plugin/transport/device_channel/proxied_channel.h"

namespace jaxhet {
namespace {

using State = ProxyTask::State;

struct TcpOfferInfo {
  uint64_t slot_bytes;
};

// An end of a channel, for its lanes.
struct LaneEnd {
  ProxiedChannel& channel;
  std::byte* slots;  // for the host
  size_t num_lanes;

  std::byte* slot(uint64_t chunk) const { return slots + SlotOf(chunk) * channel.slot_bytes(); }
};

// Sends the chunks of one lane.
class Sender final : public SocketLane::Direction {
 public:
  Sender(LaneEnd end, size_t lane)
      : end_(end), lane_(lane), chunks_(end.channel.words().source, end.channel.slot_bytes()) {}

  State Advance(Socket& socket) override {
    const std::optional<DeviceChunkInfo> chunk = Next();
    if (!chunk) return State::kIdle;
    const uint32_t slot = SlotOf(chunk->chunk);
    if (!Has(end_.channel.words().tail.at(slot), GenerationOf(chunk->chunk)))
      return State::kWaiting;
    IoList bytes;
    bytes.Add(&*chunk, sizeof *chunk);
    bytes.Add(end_.slot(chunk->chunk), chunk->num_bytes);
    const size_t left = bytes.num_bytes() - sent_;
    if (left > 0) sent_ += socket.Write(bytes.Cut(sent_, left));
    if (!socket.send_failure().empty()) Throw(ErrorCode::kTransport, socket.send_failure());
    if (sent_ < bytes.num_bytes() || !socket.is_flushed()) {
      return socket.writable() ? State::kMoved : State::kIdle;
    }
    sent_ = 0;
    Set(end_.channel.words().head.at(slot), GenerationOf(chunk->chunk));
    chunks_.Advance(*chunk);
    return State::kMoved;
  }
  void Fail(const Error& error) override { end_.channel.Fail(error); }

 private:
  // The next chunk of this lane, if it is launched.
  std::optional<DeviceChunkInfo> Next() {
    std::optional<DeviceChunkInfo> chunk = chunks_.Next();
    while (chunk && chunk->chunk % end_.num_lanes != lane_) {
      chunks_.Advance(*chunk);
      chunk = chunks_.Next();
    }
    end_.channel.ComeTo(lane_, chunks_.exchange());
    return chunk;
  }

  LaneEnd end_;
  size_t lane_;
  ChunkCounter chunks_;
  size_t sent_ = 0;  // bytes of the next chunk, with its description
};

// Receives the chunks of one lane.
class Receiver final : public SocketLane::Direction {
 public:
  Receiver(LaneEnd end, size_t lane) : end_(end), next_chunk_(lane) {}

  State Advance(Socket& socket) override {
    while (true) {
      if (!chunk_ && described_ == description_.size()) Begin();
      if (chunk_ && !Has(end_.channel.words().head.at(SlotOf(chunk_->chunk)),
                         GenerationOf(chunk_->chunk) - 1)) {
        return State::kWaiting;
      }
      if (chunk_ && received_ == chunk_->num_bytes) {
        End();
        return State::kMoved;
      }
      Read(socket);
      if (!socket.readable()) return State::kIdle;
    }
  }
  void Fail(const Error& error) override { end_.channel.Fail(error); }

 private:
  void Begin() {
    chunk_ = ParseDeviceChunkInfo(description_, next_chunk_, end_.channel.slot_bytes());
    next_chunk_ += end_.num_lanes;
    received_ = described_ = 0;
  }
  void End() {
    const DeviceChunkInfo info = *std::exchange(chunk_, std::nullopt);
    if (!end_.channel.IsAgreed(info)) return;  // whoever looks at the logs fails the job
    Set(end_.channel.words().tail.at(SlotOf(info.chunk)), GenerationOf(info.chunk));
  }
  // Reads of the rest of the chunk and the description of the next one what has arrived.
  void Read(Socket& socket) {
    const size_t wanted = chunk_ ? chunk_->num_bytes - received_ : 0;
    const std::array entries = {
        ToIovec(wanted > 0 ? end_.slot(chunk_->chunk) + received_ : nullptr, wanted),
        ToIovec(&description_[described_], description_.size() - described_)};
    const size_t num_bytes = socket.Read(std::span(entries).subspan(wanted > 0 ? 0 : 1));
    received_ += std::min(num_bytes, wanted);
    described_ += num_bytes - std::min(num_bytes, wanted);
    if (socket.closed() && (chunk_ || described_ > 0)) {
      Throw(ErrorCode::kTransport, "the peer has closed the connection: ", socket.close_reason());
    }
  }

  LaneEnd end_;
  uint64_t next_chunk_;
  std::array<std::byte, sizeof(DeviceChunkInfo)> description_{};  // description of the next chunk
  size_t described_ = 0;                                          // bytes received so far
  std::optional<DeviceChunkInfo> chunk_;                          // the one that arrives
  size_t received_ = 0;                                           // bytes received so far
};

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
    for (const auto& lane : lanes_) fds.push_back(lane->fd());
    return fds;
  }
  // The sockets were authenticated; there is no memory to prove.
  void Prove(Device& /*device*/, std::span<const std::byte> /*proof*/) override {}
  bool IsProven(Device& /*device*/, std::span<const std::byte> /*proof*/) override { return true; }
  void Settle(Proxy& proxy) override {
    const LaneEnd end{*this, static_cast<std::byte*>(slots_memory_.get()), lanes_.size()};
    for (size_t i = 0; i < lanes_.size(); ++i) {
      directions_.push_back(std::make_unique<Direction>(end, i));
      lanes_[i]->Attach(*directions_[i]);
      proxy.Add(*lanes_[i]);
    }
  }
  void Launched() override {
    while (const auto chunk = launched_.Next()) {
      lanes_[chunk->chunk % lanes_.size()]->Wake();
      launched_.Advance(*chunk);
    }
  }
  void Cut() override {
    for (size_t i = 0; i < directions_.size(); ++i) lanes_[i]->Detach(*directions_[i]);
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

ProxyTask::State SocketLane::Advance() {
  const std::lock_guard lock(mutex_);
  socket_.Flush();
  State state = State::kIdle;
  std::erase_if(directions_, [&](Direction* direction) {
    try {
      state = std::max(state, direction->Advance(socket_));
      return false;
    } catch (const Error& error) {
      direction->Fail(error);
      return true;
    }
  });
  return state;
}

void SocketLane::Attach(Direction& direction) {
  {
    const std::lock_guard lock(mutex_);
    directions_.push_back(&direction);
  }
  Wake();
}

void SocketLane::Detach(Direction& direction) {
  const std::lock_guard lock(mutex_);
  std::erase(directions_, &direction);
}

std::pair<std::unique_ptr<DeviceChannel>, std::string> MakeTcpChannel(const ChannelSetup& setup) {
  CheckLanes(setup);
  const TcpOfferInfo info{HostSlotBytes(setup)};
  return {std::make_unique<TcpChannel<Receiver>>(setup, info.slot_bytes),
          std::string(reinterpret_cast<const char*>(&info), sizeof info)};
}

std::unique_ptr<DeviceChannel> OpenTcpChannel(const ChannelSetup& setup, std::string_view offer) {
  CheckLanes(setup);
  TcpOfferInfo info{};
  if (offer.size() != sizeof info) Throw(ErrorCode::kTransport, "the peer's offer is cut");
  std::memcpy(&info, offer.data(), sizeof info);
  CheckSlotBytes(info.slot_bytes);
  return std::make_unique<TcpChannel<Sender>>(setup, info.slot_bytes);
}

}  // namespace jaxhet
