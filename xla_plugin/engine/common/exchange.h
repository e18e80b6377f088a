#ifndef XLA_PLUGIN_ENGINE_COMMON_EXCHANGE_H_
#define XLA_PLUGIN_ENGINE_COMMON_EXCHANGE_H_

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "xla_plugin/base/error.h"
#include "xla_plugin/transport/transport.h"

namespace jaxhet {

// A list that never changes. Copies share it.
template <typename T>
class SharedList {
 public:
  SharedList() = default;
  // NOLINTBEGIN(google-explicit-constructor,misc-explicit-constructor): a vector converts
  SharedList(std::vector<T> items)
      : items_(std::make_shared<const std::vector<T>>(std::move(items))) {}
  SharedList(std::initializer_list<T> items) : SharedList(std::vector<T>(items)) {}
  // NOLINTEND(google-explicit-constructor,misc-explicit-constructor)

  const T* begin() const { return items_ ? items_->data() : nullptr; }
  const T* end() const { return begin() + size(); }
  size_t size() const { return items_ ? items_->size() : 0; }
  bool empty() const { return size() == 0; }

 private:
  std::shared_ptr<const std::vector<T>> items_;
};

using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;

// Bytes to and from a process by a connection, or by a device channel in its one direction.
struct PeerCounts {
  int process = 0;
  std::string transport;  // empty: no data moves
  uint64_t bytes_sent = 0;
  uint64_t bytes_received = 0;
  Clock::duration waited{};    // sum of own transfers' waits for the peer's starts
  uint64_t path_failures = 0;  // after which the path to it works differently
  std::vector<Refusal> refusals;
};

// Operation of a group's members on their operands.
enum class ExchangeKind : int64_t { kPermute = 0, kAllGather = 1, kAllToAll = 2 };

inline constexpr std::array<std::pair<std::string_view, ExchangeKind>, 3> kExchangeKinds = {{
    {"permute", ExchangeKind::kPermute},
    {"all_gather", ExchangeKind::kAllGather},
    {"all_to_all", ExchangeKind::kAllToAll},
}};

// Called once, with null or the error that failed the engine.
using DoneCallback = std::function<void(const Error*)>;

// `source` sends its operands to `target`.
struct Pair {
  int source;
  int target;
};

// One rank's part of one exchange of a plan.
//   permute:    the target of a pair gets the source's operands; a rank that is no target, zeros. A
//               rank is the target of one pair at most, and the source of any number.
//   all_gather: the first bytes of the members' operands, joined in group order, are the result.
//               A result with room for the members of a larger group is unchanged behind its own.
//   all_to_all: a result has one block per member, which gets that member's block number
//               <own index in the group>. The last blocks of an operand may be shorter or empty;
//               zeros fill the result's up.
struct RankExchange {
  int rank = 0;
  ExchangeKind kind = ExchangeKind::kAllGather;
  int64_t plan = 0;
  int64_t index = 0;         // the exchange's number in the plan
  SharedList<int> group;     // the communicator: ranks
  size_t group_size = 0;     // size of the exchange's largest group; 0: of this group
  SharedList<int> siblings;  // other ranks of this process that are in a group of the exchange
  SharedList<Pair> pairs;    // permutes only; the group is all that they connect with the rank
  int64_t deadline_ms = 0;   // 0: Options::deadline_ms
  int64_t handle = 0;        // key of a start or finish; 0: the exchange is whole
  bool is_finish = false;
  bool is_detached = false;  // may end after its execution
  bool skips_own = false;  // on GPUs, the block of the result that is the rank's own stays as it is
  size_t part_bytes = 0;   // on GPUs, size of a permute's parts, each with a Done(); 0: one part
};

// A start on a CPU. The buffers stay valid until `done` is called.
struct ExchangeRequest : RankExchange {
  int64_t run_id = 0;  // equal for the exchanges of one execution of a program, and only for them
  // GCC wants an initializer of each member that a designated initializer leaves out.
  // NOLINTBEGIN(readability-redundant-member-init)
  std::vector<std::span<const std::byte>> operands = {};
  std::vector<std::span<std::byte>> results = {};  // one for each operand
  DoneCallback done = {};
  // NOLINTEND(readability-redundant-member-init)
};

// An exchange of a plan for all ranks, as the compiler's passes made it.
struct PlannedExchange {
  ExchangeKind kind = ExchangeKind::kPermute;
  std::vector<int64_t> ranks;  // all groups, as GroupOf() reads them; of a permute, as PairsOf()
  int64_t group_size = 0;      // at least the members of the largest group
  int64_t deadline_ms = 0;     // 0: Options::deadline_ms
  bool skips_own = false;      // this and the next ones: see RankExchange
  int64_t part_bytes = 0;
  int64_t handle = 0;
  bool is_finish = false;
  int64_t handle_bytes = 0;  // with a handle, size of the operand
};

struct Exchange;

// The part of an exchange that two ranks share.
struct PeerTransfer : Transfer {
  Exchange* exchange = nullptr;
  int peer_rank = 0;
  bool met = false;  // the peer's start has come
};

struct Exchange {
  ExchangeRequest request;
  int64_t id = 0;
  uint64_t communicator = 0;
  int64_t run = 0;
  int64_t sequence = 0;
  Time started;
  std::deque<PeerTransfer> transfers;  // one per rank that it moves bytes from or to, or meets
  size_t open_transfers = 0;
};

// The group that holds `rank`, out of all groups of an exchange one after the other. Each has
// `group_size` entries, of which the last ones are -1 in a smaller group. Throws UsageError if no
// group holds it.
std::vector<int> GroupOf(std::span<const int64_t> ranks, int64_t group_size, int rank);

// The pairs of a permute, out of sources and targets in turn. Throws UsageError if a rank is the
// target of two.
std::vector<Pair> PairsOf(std::span<const int64_t> ranks);

// The parts of this process's ranks, by rank. In a permute every rank has a part, else the members
// of a group. Throws UsageError as GroupOf() and PairsOf() do.
std::map<int, RankExchange> PartsOf(const PlannedExchange& exchange, int64_t plan, int64_t index,
                                    std::span<const int> own_ranks);

// `rank` and the ranks that `pairs` connect with it, directly or through others, in order. All
// other ranks may be in another branch of their program.
std::vector<int> ConnectedTo(int rank, std::span<const Pair> pairs);

// Equal for equal groups in equal order.
uint64_t CommunicatorId(std::span<const int> group);

}  // namespace jaxhet

#endif  // XLA_PLUGIN_ENGINE_COMMON_EXCHANGE_H_
