#ifndef XLA_PLUGIN_ENGINE_DEVICE_TRANSFER_PLAN_H_
#define XLA_PLUGIN_ENGINE_DEVICE_TRANSFER_PLAN_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "xla_plugin/device/device.h"
#include "xla_plugin/engine/common/exchange.h"
#include "xla_plugin/transport/device_channel/device_channel.h"

// The plan of an exchange between devices: which bytes move between which ranks, by which route,
// in which chunks. Pure functions; DeviceRank runs the plan.
namespace jaxhet {

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

}  // namespace jaxhet

#endif  // XLA_PLUGIN_ENGINE_DEVICE_TRANSFER_PLAN_H_
