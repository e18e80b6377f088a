#include "xla_plugin/engine/device/in_flight.h"

#include <algorithm>

#include "xla_plugin/base/error.h"

namespace jaxhet {
namespace {

DeviceTransfer PermuteTransfer(const DeviceRequest& request) {
  DeviceTransfer transfer;
  transfer.operand = request.operand;
  transfer.result = request.result;
  for (const auto [source, target] : request.pairs) {
    if (source == request.rank) transfer.target = target;
    if (target == request.rank) transfer.source = source;
  }
  const size_t num_bytes = request.operand.size();
  transfer.part_bytes = request.part_bytes;
  if (transfer.part_bytes > 0 && transfer.part_bytes < num_bytes) {
    transfer.parts =
        static_cast<uint32_t>((num_bytes + transfer.part_bytes - 1) / transfer.part_bytes);
  }
  return transfer;
}

std::vector<DeviceTransfer> GroupTransfers(const DeviceRequest& request) {
  const SharedList<int>& group = request.group;
  const size_t members = group.size();
  const bool is_gather = request.kind == ExchangeKind::kAllGather;
  const size_t block = request.operand.size() / (is_gather ? 1 : members);
  const size_t blocks = is_gather ? std::max(members, request.group_size) : members;
  if (request.result.size() != block * blocks) {
    Throw(ErrorCode::kUsage, "an exchange of ", members, " devices can't turn ",
          request.operand.size(), " bytes into ", request.result.size());
  }
  const auto own = static_cast<size_t>(std::ranges::find(group, request.rank) - group.begin());
  std::vector<DeviceTransfer> transfers(request.skips_own && members > 1 ? members - 1 : members);
  for (size_t i = 0; i < transfers.size(); ++i) {
    DeviceTransfer& transfer = transfers[i];
    const size_t to = (own + i + 1) % members;
    const size_t from = (own + members - i - 1) % members;
    if (to == own) {
      transfer.is_own = true;
    } else {
      transfer.target = group.begin()[to];
      transfer.source = group.begin()[from];
    }
    transfer.operand = is_gather ? request.operand : request.operand.subspan(to * block, block);
    transfer.result = request.result.subspan(from * block, block);
  }
  return transfers;
}

}  // namespace

InFlight& InFlightTransfers::Find(uint32_t number) {
  const auto found = std::ranges::find(all, number, &InFlight::number);
  if (found == all.end()) Throw(ErrorCode::kPeer, "the job failed before its done");
  return *found;
}

uint32_t NextNumber(uint32_t& last, uint32_t count) {
  return last = DeviceNumber(uint64_t{last} + count);
}

Marks StreamProgress::NextForChunks(uint64_t first_chunk, uint64_t num_chunks) {
  Marks marks{};
  for (uint64_t i = 0; i < std::min<uint64_t>(num_chunks, kStreams); ++i) {
    const size_t s = (first_chunk + i) % kStreams;
    marks.at(s) = NextFor(s);
  }
  return marks;
}

bool StreamProgress::IsOver(const Marks& marks) const {
  bool is_over = true;
  for (size_t s = 0; s < marks.size(); ++s)
    is_over &= marks.at(s) == 0 || Reached(s) >= marks.at(s);
  return is_over;
}

bool StreamProgress::AreStreamsIdle() const {
  Marks ours{};
  std::copy_n(last_.begin(), kStreams, ours.begin());
  return IsOver(ours);
}

std::vector<DeviceTransfer> PlanTransfers(const DeviceRequest& request) {
  switch (request.kind) {
    case ExchangeKind::kPermute:
      return {PermuteTransfer(request)};
    case ExchangeKind::kAllGather:
    case ExchangeKind::kAllToAll:
      return GroupTransfers(request);
  }
  Throw(ErrorCode::kUsage, "no exchange has the kind ", static_cast<int64_t>(request.kind));
}

uint64_t NumChunks(size_t num_bytes, size_t slot_bytes) {
  const size_t chunk_bytes = ChunkBytes(num_bytes, slot_bytes);
  return std::max<uint64_t>(1, (num_bytes + chunk_bytes - 1) / chunk_bytes);
}

}  // namespace jaxhet
