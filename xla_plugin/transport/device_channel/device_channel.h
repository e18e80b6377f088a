#ifndef XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_DEVICE_CHANNEL_H_
#define XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_DEVICE_CHANNEL_H_

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "xla_plugin/base/fd.h"
#include "xla_plugin/device/device.h"
#include "xla_plugin/net/seal.h"
#include "xla_plugin/net/verbs/memory.h"
#include "xla_plugin/net/verbs/nics.h"
#include "xla_plugin/transport/device_channel/shared_memory.h"

// A device channel is the one-way path from one rank to another that their devices use by
// themselves, in the order of their streams:
//
//   source's device                              target's device
//   waits for `head`: the slot was read
//   copies a chunk of the operand into it
//   writes `tail`                         ->     waits for `tail`
//                                                copies the slot into the result
//                                       <-     writes `head`
//
// Chunk c of a channel is the (c / kChannelSlots + 1)th one in slot c % kChannelSlots. This number,
// the slot's generation, is written and waited for.
//
// Where the target's device reaches the memory that the source's operands lie in, long exchanges
// can be pulled instead, as a whole:
//
//   writes `ready`                        ->     waits for `ready`
//                                                copies the operand into the result
//   waits for `taken`                     <-     writes `taken`
//
// with the number of the exchange. The target must know where the operand is, so the ends choose
// the route of each such exchange: it is pulled if the source launches it before the target gives
// up waiting for that.
namespace jaxhet {

// Pinned host memory of one end of a channel.
struct ArenaPiece {
  std::byte* words = nullptr;
  void* words_on_device = nullptr;
  std::byte* slots = nullptr;
  void* slots_on_device = nullptr;
  size_t slot_bytes = 0;
  std::span<const std::shared_ptr<verbs::Nic>> nics;  // NICs that reach the slots
  const verbs::NicMemory* nic_memory = nullptr;       // null if none does
};

// Bytes of a piece, and a piece at these addresses.
size_t PieceBytes(size_t slot_bytes);
ArenaPiece PieceAt(std::byte* host, std::byte* on_device, size_t slot_bytes);

// Memory of a rank for the channels that are opened while its device works. The driver gives it at
// the start: a call later could wait for work of the device that waits for a peer, and hold up the
// launches of another device meanwhile.
class ChannelArena {
 public:
  // Room for channels to and from each of these ranks.
  ChannelArena(Device& device, std::span<const int> peer_ranks, size_t slot_bytes);
  ChannelArena(const ChannelArena&) = delete;
  ChannelArena& operator=(const ChannelArena&) = delete;

  // Set-up: lets NICs reach the memory.
  void Register(std::vector<std::shared_ptr<verbs::Nic>> nics);
  // Null for a rank that has none. Stays valid.
  const ArenaPiece* PieceFor(int peer_rank, bool is_incoming) const;

 private:
  PinnedMemory memory_;
  std::span<std::byte> bytes_;
  std::vector<std::shared_ptr<verbs::Nic>> nics_;
  std::unique_ptr<verbs::NicMemory> nic_memory_;
  std::map<std::pair<int, bool>, ArenaPiece> pieces_;
};

class Proxy;
class Lane;

inline constexpr uint32_t kChannelSlots = 16;
inline constexpr uint32_t kTakenWords = 2;
// Slots of all channels to one device together, at most, if they can be as small as the least.
inline constexpr size_t kMostDeviceBytes = size_t{256} << 20;
inline constexpr size_t kLeastSlotBytes = 4096;  // minimum of the option slot_bytes; a NIC's proof
// Largest slot of host and socket: caches hold several of these.
inline constexpr size_t kMostHostSlotBytes = size_t{2} << 20;
inline constexpr size_t kProofBytes = 64;
// Lets all waits for a word pass. HIP compares without wrapping around.
inline constexpr uint32_t kOpen = 0x7FFF'FFFF;

// `number` as a device compares it. Throws UsageError if it is too large.
uint32_t DeviceNumber(uint64_t number);
// The slot of a chunk, and the value of the slot's words once the chunk is in it, or was taken out.
inline uint32_t SlotOf(uint64_t chunk) { return static_cast<uint32_t>(chunk % kChannelSlots); }
inline uint32_t GenerationOf(uint64_t chunk) { return DeviceNumber(chunk / kChannelSlots + 1); }

// Description of an exchange that both ends of a channel must agree on.
struct Launch {
  int64_t plan;
  int64_t index;
  uint64_t num_bytes;
  auto operator<=>(const Launch&) const = default;
};

// Memory of a LaunchLog; zero at first.
struct LaunchEntry {
  std::atomic<uint64_t> number;
  std::atomic<int64_t> plan;
  std::atomic<int64_t> index;
  std::atomic<uint64_t> num_bytes;
  std::atomic<uint64_t> place;
};
template <uint64_t kEntries>
struct LaunchMemory {
  std::atomic<uint64_t> last;
  std::array<LaunchEntry, kEntries> entries;
};
static_assert(std::atomic<uint64_t>::is_always_lock_free);  // it may lie between processes

// Launches of one end of a channel, for the other end to compare: each end writes its launch,
// then reads the other's. One of them sees both. Numbers count from 1.
class LaunchLog {
 public:
  LaunchLog() = default;
  template <uint64_t kEntries>
  explicit LaunchLog(LaunchMemory<kEntries>& memory)
      : last_(&memory.last), entries_(memory.entries) {}

  // An entry is overwritten by the one `capacity()` later: everybody who reads it must have done so
  // by then.
  uint64_t capacity() const { return entries_.size(); }
  // `place`: address of a pulled operand.
  void Publish(uint64_t number, const Launch& launch, uint64_t place = 0) const;
  // None if it has not been published (or was overwritten).
  std::optional<Launch> Find(uint64_t number) const;
  // Place of a published launch whose operand is pulled.
  uint64_t PlaceOf(uint64_t number) const;
  // The number of the latest launch.
  uint64_t last() const { return last_->load(std::memory_order_seq_cst); }

 private:
  std::atomic<uint64_t>* last_ = nullptr;
  std::span<LaunchEntry> entries_;
};

inline constexpr uint64_t kSharedLaunches = 4096;  // entries of a log that both processes see

// The routes of the latest exchanges that may be zero-copy: the first end to choose decides.
class RouteChoices {
 public:
  enum class Route : uint8_t { kZeroCopy, kSlots };

  // `route`, or what the other end has chosen before.
  Route Choose(uint64_t number, Route route);
  std::optional<Route> Find(uint64_t number) const;

 private:
  // Twice the number, and the route.
  std::array<std::atomic<uint64_t>, kSharedLaunches> entries_;
};

// Word in host memory that a device waits for; it has a cache line of its own.
struct alignas(64) DeviceWord {
  uint32_t value;

  std::atomic_ref<uint32_t> host() { return std::atomic_ref(value); }
};

// Words of a channel that devices see; all but `intact` are zero at first.
struct ChannelWords {
  std::array<DeviceWord, kChannelSlots> tail;  // written by the source's device
  std::array<DeviceWord, kChannelSlots> head;  // written by the target's device
  DeviceWord ready;                            // written by the source's device
  std::array<DeviceWord, kTakenWords> taken;   // in turns, written by the target's device
  // kOpen while the source is healthy. 0: it has failed, and may overwrite slots that were not
  // read. The target's device waits for it last, before a result counts.
  DeviceWord intact;
  std::atomic<uint64_t> pull_bytes;  // exchanges from this size on may be pulled; 0: none

  // Two exchanges in a row may be pulled at the same time.
  DeviceWord& TakenOf(uint64_t exchange) { return taken.at(exchange % kTakenWords); }
};

// Memory of a channel that both ends see, but for its slots.
struct SharedWords {
  ChannelWords words;
  RouteChoices routes;
  LaunchMemory<kSharedLaunches> source;
  LaunchMemory<kSharedLaunches> target;
};

// Lengths of the chunks that an exchange of `num_bytes` goes in, but the last one: equal at both
// ends. At least one chunk.
size_t ChunkBytes(size_t num_bytes, size_t slot_bytes);

// One rank's end of a channel. Slots have addresses of its device.
class DeviceChannel {
 public:
  virtual ~DeviceChannel() = default;
  DeviceChannel(const DeviceChannel&) = delete;
  DeviceChannel& operator=(const DeviceChannel&) = delete;

  size_t slot_bytes() const { return slot_bytes_; }
  ChannelWords& words() const { return *words_; }
  // Address of one of the words on the end's device.
  void* AddressOf(const DeviceWord& word) const {
    return device_words_ +
           (reinterpret_cast<const std::byte*>(&word) - reinterpret_cast<const std::byte*>(words_));
  }
  // Launches of either end.
  const LaunchLog& source_log() const { return source_log_; }
  const LaunchLog& target_log() const { return target_log_; }
  // Only of a channel that can be pulled from.
  RouteChoices& routes() const { return *routes_; }
  void* slot(uint32_t slot) const { return slots_ + slot * slot_bytes_; }

  // Set-up, by the source: what the target's Accept() needs to know.
  virtual std::string Answer() { return {}; }
  virtual void Accept([[maybe_unused]] std::string_view answer) {}
  // Set-up, after that: the source writes `proof` into slot 0, and the target looks for it there.
  virtual void Prove(Device& device, std::span<const std::byte> proof);
  virtual bool IsProven(Device& device, std::span<const std::byte> proof);
  // Exchanges of fewer bytes are never pulled.
  uint64_t pull_bytes() const {
    const uint64_t num_bytes = words_->pull_bytes;
    return num_bytes == 0 ? std::numeric_limits<uint64_t>::max() : num_bytes;
  }
  // For the source: where the target finds the operand; none if it can't reach it.
  virtual std::optional<uint64_t> PlaceOf(std::span<const std::byte> operand) const;
  // For the target: `num_bytes` at a place. Throws TransportError if the place lies outside of the
  // source's memory.
  virtual const std::byte* At(uint64_t place, size_t num_bytes) const;
  // For the source: the latest launch whose log entry can be reused; none where the target's log,
  // which the source sees, says so.
  virtual std::optional<uint64_t> Passed() const { return std::nullopt; }
  // Both ends see the same words, and the target its slots, whether or not the source lives.
  virtual bool is_shared() const { return true; }
  // Network paths to the peer that failed and were left.
  virtual uint64_t num_path_failures() const { return 0; }
  // Advice for people if the channel could be faster; or empty.
  virtual std::string Remark() const { return {}; }
  // Set-up is over. The rank's proxy drives the channel from now on if devices can't alone.
  virtual void Settle([[maybe_unused]] Proxy& proxy) {}
  // Called by the source after it has published launches.
  virtual void Launched() {}
  // The job has failed: no proxy moves anything any more, and what the source's device writes into
  // slots from now on does not count for the target. A copy that the target has begun may count.
  virtual void Cut() { words_->intact.host().store(0); }
  // Why nothing moves on the channel any more; "" while all is well.
  virtual std::string Failure() const { return {}; }

 protected:
  DeviceChannel() = default;

  // The device sees the words at `device_address`.
  void SetWords(ChannelWords& words, void* device_address, LaunchLog source, LaunchLog target) {
    words_ = &words;
    device_words_ = static_cast<std::byte*>(device_address);
    source_log_ = source;
    target_log_ = target;
  }
  void SetWords(SharedWords& shared, void* device_address) {
    SetWords(shared.words, device_address, LaunchLog(shared.source), LaunchLog(shared.target));
    routes_ = &shared.routes;
  }
  void SetSlots(void* slots, size_t slot_bytes) {
    slots_ = static_cast<std::byte*>(slots);
    slot_bytes_ = slot_bytes;
  }

 private:
  ChannelWords* words_ = nullptr;
  std::byte* device_words_ = nullptr;
  LaunchLog source_log_;
  LaunchLog target_log_;
  RouteChoices* routes_ = nullptr;
  std::byte* slots_ = nullptr;
  size_t slot_bytes_ = 0;
};

struct ChannelSetup {
  Device& device;  // device of the rank at this end
  bool same_process;
  bool same_host;
  bool same_vendor;
  size_t slot_bytes;  // said by the target; of a piece: the piece's
  size_t pull_bytes;  // said by the source
  // Memory of the device that a proof fits in, in the allocation that operands will be in. Empty:
  // nothing is pulled.
  std::span<std::byte> operands;
  // Sockets of these two ranks, for this channel and the one back; may be none.
  std::span<const std::shared_ptr<Lane>> lanes;
  verbs::Nics* nics;  // NICs of this process
  // Memory for this end; null: the end allocates its own.
  const ArenaPiece* piece = nullptr;
  Encryption encryption = Encryption::kOff;
};

// The slots of `num_channels` channels are to have `wanted` bytes each, and `budget` together.
size_t FairSlotBytes(size_t wanted, size_t budget, size_t num_channels);

// `slot_bytes` is the target's offer. Throws TransportError if no target offers that, or this end's
// piece is smaller.
void CheckSlotBytes(uint64_t slot_bytes, const ArenaPiece* piece = nullptr);

inline size_t HostSlotBytes(const ChannelSetup& setup) {
  return std::min(setup.slot_bytes, kMostHostSlotBytes);
}

using MadeChannel = std::pair<std::unique_ptr<DeviceChannel>, std::string>;

// A kind of channel. Both functions throw the reason if this end can't have one.
struct DeviceTransport {
  std::string_view name;
  // The target's end, and what the source's Open() needs to know of it.
  MadeChannel (*make)(const ChannelSetup& setup);
  std::unique_ptr<DeviceChannel> (*open)(const ChannelSetup& setup, std::string_view offer);
};
extern const DeviceTransport local_transport, cuda_ipc_transport, hip_ipc_transport, host_transport;
extern const DeviceTransport verbs_transport, socket_transport;

// All of them, best first.
std::span<const DeviceTransport> DeviceTransports();

}  // namespace jaxhet

#endif  // XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_DEVICE_CHANNEL_H_
