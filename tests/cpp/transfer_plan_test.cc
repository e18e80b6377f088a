#include "xla_plugin/engine/device/transfer_plan.h"

#include <algorithm>
#include <deque>
#include <map>
#include <numeric>
#include <utility>
#include <vector>

#include "tests/cpp/testing.h"
#include "tests/cpp/world.h"
#include "xla_plugin/base/strings.h"

// The plan of exchanges between devices, carried out in memory.
namespace jaxhet::testing {
namespace {

using ::testing::HasSubstr;

constexpr int kMostRanks = 17;
constexpr size_t kTestSlotBytes = 64;
constexpr std::byte kUnset{0xEE};

struct Node {
  std::vector<std::byte> operand;
  std::vector<std::byte> result;
  std::vector<int> writes;  // by byte of the result
};

// The ranks of an exchange, and what they send, by source and target, in order.
class Memory {
 public:
  Memory(int num_ranks, size_t operand_bytes, size_t result_bytes) {
    for (int rank = 0; rank < num_ranks; ++rank) {
      nodes_.push_back({.operand = Pattern(rank, 0, operand_bytes),
                        .result = std::vector<std::byte>(result_bytes, kUnset),
                        .writes = std::vector<int>(result_bytes, 0)});
    }
  }

  Node& node(int rank) { return nodes_.at(static_cast<size_t>(rank)); }
  int num_ranks() const { return static_cast<int>(nodes_.size()); }

  // By chunks on channels whose chunks have these numbers already, as slots move them.
  void Send(int rank, const DeviceTransfer& transfer, uint64_t first_chunk) {
    if (transfer.target < 0) return;
    auto& channel = channels_[{rank, transfer.target}];
    ForEachChunk(transfer.operand.size(), kTestSlotBytes, first_chunk, [&](const Chunk& chunk) {
      const auto bytes = transfer.operand.subspan(chunk.begin, chunk.num_bytes);
      channel.push_back({chunk.slot(), chunk.generation(), {bytes.begin(), bytes.end()}});
    });
  }
  void Receive(int rank, const DeviceTransfer& transfer, uint64_t first_chunk) {
    if (transfer.is_own()) Write(rank, transfer.result, transfer.operand);
    if (transfer.source < 0) return;
    auto& channel = channels_[{transfer.source, rank}];
    ForEachChunk(transfer.result.size(), kTestSlotBytes, first_chunk, [&](const Chunk& chunk) {
      EXPECT_FALSE(channel.empty());
      if (channel.empty()) return;
      const auto [slot, generation, bytes] = std::move(channel.front());
      channel.pop_front();
      EXPECT_TRUE(slot == chunk.slot() && generation == chunk.generation());
      EXPECT_EQ(bytes.size(), chunk.num_bytes);
      Write(rank, transfer.result.subspan(chunk.begin, chunk.num_bytes), bytes);
    });
  }
  // In parts, as zero-copy reads them.
  void Get(int rank, const DeviceTransfer& transfer, const DeviceTransfer& source) {
    EXPECT_TRUE(source.operand.size() == transfer.result.size() && source.target == rank);
    ForEachPart(transfer, [&](const TransferPart& part) {
      Write(rank, transfer.result.subspan(part.begin, part.num_bytes),
            source.operand.subspan(part.begin, part.num_bytes));
    });
  }
  bool IsEmpty() const {
    return std::ranges::all_of(channels_, [](const auto& entry) { return entry.second.empty(); });
  }

 private:
  struct Sent {
    uint32_t slot;
    uint32_t generation;
    std::vector<std::byte> bytes;
  };

  void Write(int rank, std::span<std::byte> to, std::span<const std::byte> from) {
    EXPECT_EQ(to.size(), from.size());
    std::ranges::copy(from, to.begin());
    const auto begin = static_cast<size_t>(to.data() - node(rank).result.data());
    for (size_t i = 0; i < to.size(); ++i) ++node(rank).writes.at(begin + i);
  }

  std::vector<Node> nodes_;
  std::map<std::pair<int, int>, std::deque<Sent>> channels_;
};

struct Case {
  ExchangeKind kind;
  std::vector<int64_t> ranks;
  int64_t group_size = 2;
  bool skips_own = false;
  int64_t part_bytes = 0;
};

std::vector<DeviceTransfer> PlanOf(Memory& memory, int rank, const Case& exchange) {
  DeviceRequest request;
  request.kind = exchange.kind;
  request.ranks = exchange.ranks;
  request.group_size = exchange.group_size;
  request.skips_own = exchange.skips_own;
  request.part_bytes = exchange.part_bytes;
  request.operand = memory.node(rank).operand;
  request.result = memory.node(rank).result;
  return PlanTransfers(request, rank);
}

// Every rank sends all, then every rank receives all.
void RunThroughSlots(Memory& memory, const Case& exchange) {
  constexpr uint64_t kFirstChunk = 5;
  for (const bool is_send : {true, false}) {
    for (int rank = 0; rank < memory.num_ranks(); ++rank) {
      std::map<int, uint64_t> next_chunks;  // by peer
      for (const DeviceTransfer& transfer : PlanOf(memory, rank, exchange)) {
        const int peer = is_send ? transfer.target : transfer.source;
        const size_t num_bytes = is_send ? transfer.operand.size() : transfer.result.size();
        uint64_t& next = next_chunks.emplace(peer, kFirstChunk).first->second;
        if (is_send) {
          memory.Send(rank, transfer, next);
        } else {
          memory.Receive(rank, transfer, next);
        }
        next += NumChunks(num_bytes, kTestSlotBytes);
      }
    }
  }
  EXPECT_TRUE(memory.IsEmpty());
}

void RunByZeroCopy(Memory& memory, const Case& exchange) {
  for (int rank = 0; rank < memory.num_ranks(); ++rank) {
    for (const DeviceTransfer& transfer : PlanOf(memory, rank, exchange)) {
      if (transfer.is_own()) memory.Receive(rank, transfer, 0);
      if (transfer.source < 0) continue;
      const auto sources = PlanOf(memory, transfer.source, exchange);
      const auto source = std::ranges::find(sources, rank, &DeviceTransfer::target);
      EXPECT_NE(source, sources.end());
      if (source != sources.end()) memory.Get(rank, transfer, *source);
    }
  }
}

// Both routes; `expected` gives the result of a rank, where unset bytes are written by nobody.
template <typename Expected>
void CheckExchange(const Case& exchange, int num_ranks, size_t operand_bytes, size_t result_bytes,
                   Expected expected) {
  for (const auto run : {&RunThroughSlots, &RunByZeroCopy}) {
    Memory memory(num_ranks, operand_bytes, result_bytes);
    run(memory, exchange);
    for (int rank = 0; rank < num_ranks; ++rank) {
      const std::vector<std::pair<size_t, std::vector<std::byte>>> blocks = expected(rank);
      std::vector<std::byte> result(result_bytes, kUnset);
      std::vector<int> writes(result_bytes, 0);
      for (const auto& [begin, bytes] : blocks) {
        std::ranges::copy(bytes, result.begin() + static_cast<ptrdiff_t>(begin));
        std::fill_n(writes.begin() + static_cast<ptrdiff_t>(begin), bytes.size(), 1);
      }
      EXPECT_EQ(memory.node(rank).result, result);
      EXPECT_EQ(memory.node(rank).writes, writes);
    }
  }
}

std::vector<int64_t> Members(int num_ranks) {
  std::vector<int64_t> members(static_cast<size_t>(num_ranks));
  std::iota(members.begin(), members.end(), 0);
  std::ranges::reverse(members);  // in another order than their ranks
  return members;
}

size_t PlaceOf(int rank, int num_ranks) { return static_cast<size_t>(num_ranks - 1 - rank); }

TEST(TransferPlanTest, GroupsSendEachByteOnce) {
  for (int n = 1; n <= kMostRanks; ++n) {
    const auto members = static_cast<size_t>(n);
    for (const size_t block :
         {size_t{0}, size_t{1}, size_t{7}, size_t{63}, size_t{64}, size_t{65}, size_t{700}}) {
      for (const bool skips_own : {false, true}) {
        const Case gather{ExchangeKind::kAllGather, Members(n), n, skips_own};
        const auto blocks = [&](int rank, bool is_gather) {
          std::vector<std::pair<size_t, std::vector<std::byte>>> all;
          const size_t from = is_gather ? 0 : PlaceOf(rank, n) * block;
          for (int other = 0; other < n; ++other) {
            if (other == rank && skips_own && n > 1) continue;
            all.emplace_back(PlaceOf(other, n) * block, Pattern(other, 0, block, from));
          }
          return all;
        };
        CheckExchange(gather, n, block, block * members,
                      [&](int rank) { return blocks(rank, true); });
        const Case all_to_all{ExchangeKind::kAllToAll, Members(n), n, skips_own};
        CheckExchange(all_to_all, n, block * members, block * members,
                      [&](int rank) { return blocks(rank, false); });
      }
    }
  }
}

// Rank 0 gets nothing, and the last rank sends nothing.
TEST(TransferPlanTest, PermutesSendEachByteOnce) {
  for (int n = 1; n <= kMostRanks; ++n) {
    Case permute{ExchangeKind::kPermute, {}};
    for (int rank = 0; rank + 1 < n; ++rank)
      permute.ranks.insert(permute.ranks.end(), {rank, rank + 1});
    for (const size_t num_bytes : {size_t{0}, size_t{1}, size_t{64}, size_t{701}}) {
      for (const int64_t part_bytes : {0, 1, 64, 100, 701}) {
        permute.part_bytes = part_bytes;
        CheckExchange(permute, n, num_bytes, num_bytes, [&](int rank) {
          std::vector<std::pair<size_t, std::vector<std::byte>>> all;
          if (rank > 0) all.emplace_back(0, Pattern(rank - 1, 0, num_bytes));
          return all;
        });
      }
    }
  }
}

// Distances grow from one transfer to the next, so that no two ranks send to one at the same time.
TEST(TransferPlanTest, TransfersOfAGroupAreByDistance) {
  constexpr int kRanks = 5;
  Memory memory(kRanks, 10, size_t{10} * kRanks);
  const Case exchange{ExchangeKind::kAllGather, {0, 1, 2, 3, 4}, kRanks};
  for (int rank = 0; rank < kRanks; ++rank) {
    const std::vector<DeviceTransfer> plan = PlanOf(memory, rank, exchange);
    EXPECT_EQ(plan.size(), size_t{kRanks});
    for (int i = 0; i + 1 < kRanks; ++i) {
      const DeviceTransfer& transfer = plan.at(static_cast<size_t>(i));
      EXPECT_EQ(transfer.target, (rank + i + 1) % kRanks);
      EXPECT_EQ(transfer.source, (rank + kRanks - i - 1) % kRanks);
      EXPECT_FALSE(transfer.is_own());
    }
    EXPECT_TRUE(plan.back().is_own() && plan.back().target < 0 && plan.back().source < 0);
  }
}

TEST(TransferPlanTest, RoutesFollowTheChannelsState) {
  const ChannelState shared{.slot_bytes = 100, .is_shared = true, .next_chunk = 3};
  const ChannelState proxied{.slot_bytes = 100, .is_shared = false, .next_chunk = 3};
  const SendState free{
      .is_zero_copy = false, .may_be_eager = true, .overtakes = false, .is_free = true};
  const auto is_eager = [&](const ChannelState& channel, size_t num_bytes, SendState state) {
    return Is<Eager>(SendRoute(channel, num_bytes, state));
  };
  EXPECT_TRUE(is_eager(shared, 100, free));
  EXPECT_TRUE(!is_eager(shared, 101, free) && !is_eager(proxied, 100, free));
  SendState state = free;
  state.may_be_eager = false;
  EXPECT_FALSE(is_eager(shared, 100, state));
  state = free;
  state.overtakes = true;
  EXPECT_FALSE(is_eager(shared, 100, state));
  state = free;
  state.is_free = false;
  EXPECT_FALSE(is_eager(shared, 100, state));
  state.is_zero_copy = true;
  EXPECT_TRUE(Is<ZeroCopy>(SendRoute(shared, 100, state)));
  EXPECT_EQ(FirstChunkOf(SendRoute(proxied, 100, free)), uint64_t{3});
  const auto route = [&](size_t num_bytes, RouteChoices::Route chosen, bool may_be_eager) {
    return std::optional(ReceiveRoute(shared, num_bytes, chosen, may_be_eager));
  };
  EXPECT_TRUE(Is<ZeroCopy>(route(7, RouteChoices::Route::kZeroCopy, true)));
  EXPECT_TRUE(Is<Eager>(route(100, RouteChoices::Route::kSlots, true)));
  EXPECT_TRUE(Is<Slots>(route(101, RouteChoices::Route::kSlots, true)));
  EXPECT_TRUE(Is<Slots>(route(7, RouteChoices::Route::kSlots, false)));
}

TEST(TransferPlanTest, WrongSizesAreRefused) {
  Memory memory(2, 100, 199);
  const Case exchange{ExchangeKind::kAllGather, {0, 1}};
  EXPECT_THAT(ThrownText([&] { (void)PlanOf(memory, 0, exchange); }),
              HasSubstr("an exchange of 2 devices can't turn 100 bytes into 199"));
}

}  // namespace
}  // namespace jaxhet::testing
