#include "xla_plugin/engine/host/partition.h"

#include <algorithm>

#include "xla_plugin/base/checked.h"

namespace jaxhet {
namespace {

// The part [offset, offset + num_bytes) of `buffer` as far as it exists.
template <typename Byte>
std::span<Byte> Part(std::span<Byte> buffer, size_t offset, size_t num_bytes) {
  const size_t begin = std::min(offset, buffer.size());
  return buffer.subspan(begin, std::min(num_bytes, buffer.size() - begin));
}

template <typename Byte>
void Add(IoList& list, std::span<Byte> part) {
  list.Add(part.data(), part.size());
}

// The buffers of a group, and the rank's place in it.
struct GroupBuffers {
  std::span<const std::byte> operand;
  std::span<std::byte> result;
  size_t position;
  size_t most_members;  // size of the largest group
};

void AllGather(const GroupBuffers& buffers, Partition& partition) {
  const auto& [operand, result, position, most_members] = buffers;
  const size_t block = operand.size();
  const size_t members = partition.members.size();
  if (result.size() > CheckedMultiply(most_members, block)) {
    Throw(ErrorCode::kUsage, "an all_gather of ", most_members, " x ", block, " bytes can't fill ",
          result.size());
  }
  const auto own = Part(result, position * block, block);
  for (size_t member = 0; member < members; ++member) {
    Add(partition.members[member].send, operand.first(own.size()));
    Add(partition.members[member].receive, Part(result, member * block, block));
  }
}

void AllToAll(const GroupBuffers& buffers, Partition& partition) {
  const auto& [operand, result, position, most_members] = buffers;
  const size_t members = partition.members.size();
  if (result.size() % members != 0 || result.size() < operand.size()) {
    Throw(ErrorCode::kUsage, "an all_to_all of ", members, " members can't turn ", operand.size(),
          " bytes into ", result.size());
  }
  const size_t block = result.size() / members;
  const size_t present = Part(operand, position * block, block).size();
  for (size_t member = 0; member < members; ++member) {
    Add(partition.members[member].send, Part(operand, member * block, block));
    Add(partition.members[member].receive, result.subspan(member * block, present));
    Add(partition.padding, result.subspan(member * block + present, block - present));
  }
}

Partition PartitionGroup(const ExchangeRequest& request) {
  const auto* const own = std::ranges::find(request.group, request.rank);
  if (own == request.group.end()) {
    Throw(ErrorCode::kUsage, "rank ", request.rank, " is in no group of the exchange");
  }
  const auto cut = request.kind == ExchangeKind::kAllGather ? &AllGather : &AllToAll;
  Partition partition;
  for (const int rank : request.group) partition.members.push_back({rank, {}, {}});
  for (size_t i = 0; i < request.operands.size(); ++i) {
    cut({.operand = request.operands[i],
         .result = request.results[i],
         .position = static_cast<size_t>(own - request.group.begin()),
         .most_members = std::max(request.group.size(), request.group_size)},
        partition);
  }
  return partition;
}

MemberParts& MemberOf(Partition& partition, int rank) {
  const auto found = std::ranges::find(partition.members, rank, &MemberParts::rank);
  if (found != partition.members.end()) return *found;
  return partition.members.emplace_back(rank);
}

Partition PartitionPairs(const ExchangeRequest& request) {
  Partition partition;
  bool is_target = false;
  for (const auto [source, target] : request.pairs) {
    is_target |= target == request.rank;
    for (size_t i = 0; i < request.operands.size(); ++i) {
      const auto operand = request.operands[i];
      const auto result = request.results[i];
      if (operand.size() != result.size()) {
        Throw(ErrorCode::kUsage, "a permute can't turn ", operand.size(), " bytes into ",
              result.size());
      }
      if (source == request.rank) Add(MemberOf(partition, target).send, operand);
      if (target == request.rank) Add(MemberOf(partition, source).receive, result);
    }
  }
  if (is_target) return partition;
  for (const auto result : request.results) Add(partition.padding, result);
  return partition;
}

}  // namespace

Partition PartitionBuffers(const ExchangeRequest& request) {
  if (request.operands.empty() || request.operands.size() != request.results.size()) {
    Throw(ErrorCode::kUsage, "an exchange of ", request.operands.size(), " operands has ",
          request.results.size(), " results");
  }
  switch (request.kind) {
    case ExchangeKind::kPermute:
      return PartitionPairs(request);
    case ExchangeKind::kAllGather:
    case ExchangeKind::kAllToAll:
      return PartitionGroup(request);
  }
  Throw(ErrorCode::kUsage, "no exchange has the kind ", static_cast<int64_t>(request.kind));
}

}  // namespace jaxhet
