#include "xla_plugin/engine/partition.h"

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

void AllGather(std::span<const std::byte> operand, std::span<std::byte> result, size_t position,
               Partition& partition) {
  const size_t block = operand.size();
  const size_t members = partition.members.size();
  if (result.size() > CheckedMultiply(members, block)) {
    Throw(ErrorCode::kUsage, "an all_gather of ", members, " x ", block, " bytes can't fill ",
          result.size());
  }
  const auto own = Part(result, position * block, block);
  for (size_t member = 0; member < members; ++member) {
    Add(partition.members[member].send, operand.first(own.size()));
    Add(partition.members[member].receive, Part(result, member * block, block));
  }
}

void AllToAll(std::span<const std::byte> operand, std::span<std::byte> result, size_t position,
              Partition& partition) {
  const size_t members = partition.members.size();
  if (result.size() % members != 0 || result.size() < operand.size()) {
    Throw(ErrorCode::kUsage, "an all_to_all of ", members, " members can't turn ", operand.size(),
          " bytes into ", result.size());
  }
  const size_t block = result.size() / members;
  const size_t share = Part(operand, position * block, block).size();
  for (size_t member = 0; member < members; ++member) {
    Add(partition.members[member].send, Part(operand, member * block, block));
    Add(partition.members[member].receive, result.subspan(member * block, share));
    Add(partition.padding, result.subspan(member * block + share, block - share));
  }
}

}  // namespace

Partition PartitionBuffers(const ExchangeRequest& request) {
  const auto own = std::ranges::find(request.group, request.rank);
  if (own == request.group.end()) {
    Throw(ErrorCode::kUsage, "rank ", request.rank, " is in no group of the exchange");
  }
  if (request.operands.empty() || request.operands.size() != request.results.size()) {
    Throw(ErrorCode::kUsage, "an exchange of ", request.operands.size(), " operands has ",
          request.results.size(), " results");
  }
  if (request.kind != ExchangeKind::kAllGather && request.kind != ExchangeKind::kAllToAll) {
    Throw(ErrorCode::kUsage, "no exchange has the kind ", static_cast<int64_t>(request.kind));
  }
  const auto cut = request.kind == ExchangeKind::kAllGather ? &AllGather : &AllToAll;
  Partition partition{.members = std::vector<MemberParts>(request.group.size()), .padding = {}};
  for (size_t i = 0; i < request.operands.size(); ++i) {
    cut(request.operands[i], request.results[i], static_cast<size_t>(own - request.group.begin()),
        partition);
  }
  return partition;
}

}  // namespace jaxhet
