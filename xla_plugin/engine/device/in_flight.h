#ifndef XLA_PLUGIN_ENGINE_DEVICE_IN_FLIGHT_H_
#define XLA_PLUGIN_ENGINE_DEVICE_IN_FLIGHT_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "xla_plugin/device/device.h"
#include "xla_plugin/engine/common/exchange.h"
#include "xla_plugin/transport/device_channel/device_channel.h"

namespace jaxhet {

// Plans of exchanges between devices (pure functions), and their transfers that were started.

// One device's start or done of an exchange. The operand and the result are its memory, and stay
// valid until the work that follows Done() on `stream` has run.
struct DeviceRequest : RankExchange {
  StreamHandle stream = nullptr;  // the program's
  // NOLINTBEGIN(readability-redundant-member-init): as in ExchangeRequest.
  std::span<const std::byte> operand = {};
  std::span<std::byte> result = {};
  // NOLINTEND(readability-redundant-member-init)
  std::byte poison = {};  // fills a result that can't arrive
};

// How the bytes of a send or a receive move.
struct Route {
  enum class Kind : uint8_t {
    kNone,      // not chosen yet, or nothing moves
    kEager,     // one chunk through a slot, on the program's stream
    kSlots,     // chunks through the channel's slots, on our streams
    kZeroCopy,  // read from the operand as a whole
  };

  Kind kind = Kind::kNone;
  uint64_t first_chunk = 0;  // number on the channel; for kEager and kSlots

  bool is_none() const { return kind == Kind::kNone; }
  bool is_eager() const { return kind == Kind::kEager; }
  bool is_zero_copy() const { return kind == Kind::kZeroCopy; }
  bool has_chunks() const { return kind == Kind::kEager || kind == Kind::kSlots; }
};

// A part of an exchange: the rank sends to at most one peer and receives from at most one. A group
// of n ranks has n - 1 transfers, for the distances 1 to n - 1 between two members, and one more
// that copies the rank's own block.
struct DeviceTransfer {
  int target = -1;      // none
  int source = -1;      // none: the result is zeros, or an own copy
  bool is_own = false;  // a copy inside the device's memory
  std::span<const std::byte> operand;
  std::span<std::byte> result;
  size_t part_bytes = 0;  // size of each part but the last, if there are several
  uint32_t parts = 1;     // Done() is called for each
};

// The transfers in the order of their starts. Throws UsageError if the sizes don't match.
std::vector<DeviceTransfer> PlanTransfers(const DeviceRequest& request);

// At least one.
uint64_t NumChunks(size_t num_bytes, size_t slot_bytes);

struct Chunk {
  uint64_t number;  // on the channel
  size_t begin;     // in the operand or the result
  size_t num_bytes;

  uint32_t slot() const { return SlotOf(number); }
  uint32_t generation() const { return GenerationOf(number); }
};

// Calls `function` with each chunk, in order.
template <typename Function>
void ForEachChunk(size_t num_bytes, size_t slot_bytes, uint64_t first_chunk, Function function) {
  const size_t chunk_bytes = ChunkBytes(num_bytes, slot_bytes);
  size_t begin = 0;
  do {
    const Chunk chunk{.number = first_chunk++,
                      .begin = begin,
                      .num_bytes = std::min(chunk_bytes, num_bytes - begin)};
    function(chunk);
    begin += chunk.num_bytes;
  } while (begin < num_bytes);
}

struct TransferPart {
  size_t begin;
  size_t num_bytes;
  uint32_t num_left;  // parts after this one
};

// Calls `function` with each part of the result, in order.
template <typename Function>
void ForEachPart(const DeviceTransfer& transfer, Function function) {
  size_t begin = 0;
  for (uint32_t num_left = transfer.parts; num_left-- > 0;) {
    const size_t num_bytes = num_left > 0 ? transfer.part_bytes : transfer.result.size() - begin;
    function(TransferPart{.begin = begin, .num_bytes = num_bytes, .num_left = num_left});
    begin += num_bytes;
  }
}

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
