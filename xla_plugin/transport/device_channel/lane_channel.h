#ifndef XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_LANE_CHANNEL_H_
#define XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_LANE_CHANNEL_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"
#include "xla_plugin/transport/device_channel/device_channel.h"
#include "xla_plugin/transport/device_channel/lane.h"

namespace jaxhet {

// Header of a chunk, sent before or with its bytes.
struct DeviceChunkInfo {
  uint64_t exchange;  // number on the channel
  int64_t plan;
  int64_t index;
  uint64_t exchange_bytes;
  uint64_t chunk;  // number on the channel
  uint64_t num_bytes;
};

// Reads the description of chunk `chunk` that a peer has sent. Throws if it describes another chunk
// or more bytes than the chunk's slot or its exchange can hold.
DeviceChunkInfo ParseDeviceChunkInfo(std::span<const std::byte, sizeof(DeviceChunkInfo)> bytes,
                                     uint64_t chunk, size_t slot_bytes);

// Counts the chunks that a channel's source sends, exchange by exchange.
class ChunkCounter {
 public:
  ChunkCounter(LaunchLog log, size_t slot_bytes) : log_(log), slot_bytes_(slot_bytes) {}

  // Number of the next chunk's exchange, which may not be launched yet.
  uint64_t exchange() const { return exchange_; }
  // None if that is not launched. Throws if the log has lost it.
  std::optional<DeviceChunkInfo> Next() const;
  // The chunk, which was the next one, is done with.
  void Advance(const DeviceChunkInfo& chunk);

 private:
  LaunchLog log_;
  size_t slot_bytes_;
  uint64_t exchange_ = 1;
  uint64_t chunk_ = 0;
  uint64_t done_bytes_ = 0;  // bytes of the exchange before the next chunk
};

// Whether the device has written the value, or a later one.
inline bool Has(DeviceWord& word, uint32_t value) {
  return word.host().load(std::memory_order_acquire) >= value;
}
// A device that sees the value also sees everything written before.
inline void Set(DeviceWord& word, uint32_t value) {
  word.host().store(value, std::memory_order_release);
}

// Entries of a log. A shared channel's log has more. A rank may have thousands of these channels,
// and its host is seldom that far ahead of the device.
inline constexpr uint64_t kProxiedLaunches = 512;

// A channel of which each end has words and slots of its own, in pinned host memory but for slots
// that a NIC can reach in a device's. Lanes carry the chunks, in turns, and set the words. To its
// device each end is a channel like the others.
class LaneChannel : public DeviceChannel {
 public:
  enum class End { kSource, kTarget };

  // Slots in pinned memory, and the lanes of the set-up.
  LaneChannel(const ChannelSetup& setup, End end, size_t slot_bytes);
  // Lanes must not move anything to memory that is gone.
  ~LaneChannel() override { LaneChannel::Cut(); }

  // Offers of all lanes.
  std::string Answer() override;
  void Accept(std::string_view answer) override;
  bool is_shared() const override { return false; }
  std::optional<uint64_t> Passed() const override;
  std::string Failure() const override;
  uint64_t num_path_failures() const override;
  void Settle(Proxy& proxy) override;
  void Launched() override;
  void Cut() override;

  // Lanes call these functions; each has a number.
  // For the source: the lane has come to this exchange, and needs no earlier entry of the log.
  void ComeTo(size_t lane, uint64_t exchange) { passed_[lane] = exchange - 1; }
  // For the target: says for the source what it has launched; false if the target has launched
  // something else.
  bool IsAgreed(const DeviceChunkInfo& info);
  // Ends all moving; the first failure is kept.
  void Fail(const Error& error);

 protected:
  // Pinned memory for the words and for slots of `pinned_bytes` each. 0: the subclass has slots of
  // its own, and calls SetSlots.
  LaneChannel(const ChannelSetup& setup, End end, std::vector<std::shared_ptr<Lane>> lanes,
              size_t pinned_bytes);
  // `slots` as lanes know them; on the device they are at `device_address`.
  void SetSlots(std::byte* slots, void* device_address, size_t slot_bytes);

  const std::vector<std::shared_ptr<Lane>>& lanes() const { return lanes_; }

 private:
  using Launches = LaunchMemory<kProxiedLaunches>;

  const End end_;
  const PinnedMemory memory_;  // null: the set-up has a piece
  const ArenaPiece piece_;
  std::unique_ptr<Launches> source_launches_ = std::make_unique<Launches>();
  std::unique_ptr<Launches> target_launches_ = std::make_unique<Launches>();
  std::vector<std::atomic<uint64_t>> passed_;  // by lane
  std::mutex publishing_;
  mutable std::mutex mutex_;
  std::string failure_;  // under mutex_
  std::vector<std::shared_ptr<Lane>> lanes_;
  std::byte* slots_ = nullptr;
  std::vector<std::unique_ptr<Lane::Direction>> directions_;  // one for each lane, once settled
  std::unique_ptr<ChunkCounter> launched_;
};

// A DeviceTransport's functions for a channel whose answer is an offer, too. The target's offer is
// its slots' size before that. `Channel::SlotBytes(setup)` throws the reason if there can be none.
template <typename Channel>
MadeChannel MakeLaneChannel(const ChannelSetup& setup) {
  const uint64_t slot_bytes = Channel::SlotBytes(setup);
  auto channel = std::make_unique<Channel>(setup, LaneChannel::End::kTarget, slot_bytes);
  std::string offer(reinterpret_cast<const char*>(&slot_bytes), sizeof slot_bytes);
  offer += channel->Answer();
  return {std::move(channel), std::move(offer)};
}
template <typename Channel>
std::unique_ptr<DeviceChannel> OpenLaneChannel(const ChannelSetup& setup, std::string_view offer) {
  Channel::SlotBytes(setup);
  const auto slot_bytes = Take<uint64_t>(offer, "the peer's offer");
  CheckSlotBytes(slot_bytes, setup.piece);
  auto channel = std::make_unique<Channel>(setup, LaneChannel::End::kSource, slot_bytes);
  channel->Accept(offer);
  return channel;
}

}  // namespace jaxhet

#endif  // XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_LANE_CHANNEL_H_
