#ifndef XLA_PLUGIN_ENGINE_DEVICE_IN_FLIGHT_H_
#define XLA_PLUGIN_ENGINE_DEVICE_IN_FLIGHT_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>

#include "xla_plugin/device/device.h"
#include "xla_plugin/engine/common/exchange.h"
#include "xla_plugin/engine/device/transfer_plan.h"
#include "xla_plugin/transport/device_channel/device_channel.h"

namespace jaxhet {

inline constexpr size_t kStreams = 2;                // for sends, and as many for receives
inline constexpr size_t kProgramStream = kStreams;   // the program's stream, as one more
inline constexpr size_t kDoneStream = kStreams + 1;  // ours that waits for the program's dones
inline constexpr size_t kMarks = kStreams + 2;
static_assert(kChannelSlots % kStreams == 0);  // a slot's chunks are all on one stream
static_assert(kTakenWords == kStreams);  // a zero-copy exchange is read by the stream of its word

// For each stream: the number of exchanges' parts that it had been given when it got its part of a
// transfer; 0 if it has no part.
using Marks = std::array<uint32_t, kMarks>;
using MarkWords = std::array<DeviceWord, kMarks>;

inline bool IsByProgram(const Marks& marks) { return marks.at(kProgramStream) != 0; }
// Whether send streams or receive streams do the transfer.
inline bool IsByStreams(const Marks& marks) {
  return std::any_of(marks.begin(), marks.begin() + kStreams, [](uint32_t mark) { return mark; });
}

template <typename Function>
void ForEachStream(const Marks& marks, Function function) {
  for (size_t s = 0; s < marks.size(); ++s) {
    if (marks.at(s) != 0) function(s);
  }
}

// Adds to the last number and returns it.
uint32_t NextNumber(uint32_t& last, uint32_t count = 1);

// Words in pinned memory, by their addresses on the host and on the device.
template <typename Words>
class DeviceWords {
 public:
  explicit DeviceWords(Device& device)
      : memory_(device.AllocatePinned(sizeof(Words))),
        words_(new (memory_.get()) Words{}),
        device_words_(static_cast<std::byte*>(device.DeviceAddress(words_))) {}

  Words* operator->() const { return words_; }
  void* AddressOf(const DeviceWord& word) const {
    return device_words_ +
           (reinterpret_cast<const std::byte*>(&word) - reinterpret_cast<const std::byte*>(words_));
  }
  PinnedMemory& memory() { return memory_; }

 private:
  PinnedMemory memory_;
  Words* words_;
  std::byte* device_words_;
};

// A rank's words. The device writes all but the first.
struct RankWords {
  DeviceWord go_on;    // waited for last at Done(), with its number; kOpen until the job fails
  DeviceWord reached;  // the first transfer of the last exchange that the program has come to
  MarkWords sent;
  MarkWords received;
};

// How far the streams are with all sends of a rank, or all its receives. One thread gives marks;
// any thread may ask whether they are over.
class StreamProgress {
 public:
  StreamProgress(const DeviceWords<RankWords>& words, MarkWords& own) : words_(words), own_(own) {}

  // Marks for chunks that take turns on our streams.
  Marks NextForChunks(uint64_t first_chunk, uint64_t num_chunks);
  uint32_t NextFor(size_t stream, uint32_t count = 1) {
    return NextNumber(last_.at(stream), count);
  }
  bool IsOver(const Marks& marks) const;
  // The kStreams streams have done all that they were given.
  bool AreStreamsIdle() const;
  uint32_t Reached(size_t stream) const { return own_.at(stream).host().load(); }
  void* AddressOf(size_t stream) const { return words_.AddressOf(own_.at(stream)); }

 private:
  const DeviceWords<RankWords>& words_;
  MarkWords& own_;
  Marks last_{};
};

// A transfer that was started.
struct InFlight {
  // The exchange of the transfer.
  struct Whole {
    uint32_t first;  // number of its first transfer
    ExchangeKind kind;
    int64_t plan;
    int64_t index;
    int64_t deadline_ms;
    size_t operand_bytes;
    std::byte poison;
    StreamHandle program;
    bool is_detached = false;  // moves through slots: Done() may follow those of later exchanges
  };
  // The send of the transfer, or the receive.
  struct Side {
    uint64_t number = 0;  // on the channel
    Route route;
    Marks marks{};
  };

  uint32_t number = 0;  // on this rank
  bool is_last = false;
  Whole exchange{};
  DeviceTransfer transfer;
  Side send;
  Side receive;
  bool is_pending = false;      // the receive is on no stream yet
  uint32_t done_parts = 0;      // parts whose Done() was called
  uint32_t done_number = 0;     // 0 until the first
  std::optional<Time> reached;  // by the device, as the watch saw it

  bool is_done() const { return done_parts == transfer.parts; }
};

// The transfers of a rank that are not over, in the order of their starts. The thread that launches
// the program adds them, and the watch removes them.
struct InFlightTransfers {
  void Add(const InFlight& transfer) {
    const std::lock_guard lock(mutex);
    all.push_back(transfer);
  }
  // The mutex is held. Throws PeerError if the transfer was removed.
  InFlight& Find(uint32_t number);

  mutable std::mutex mutex;  // guards the members below; no driver call is made under it
  std::deque<InFlight> all;
  uint32_t dones = 0;  // exchanges whose Done() was called
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_ENGINE_DEVICE_IN_FLIGHT_H_
