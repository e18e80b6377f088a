#include "xla_plugin/engine/device/in_flight.h"

#include <algorithm>

#include "xla_plugin/base/error.h"

namespace jaxhet {

InFlight& InFlightTransfers::Find(uint32_t number) {
  const auto found = std::ranges::find(all, number, &InFlight::number);
  if (found == all.end()) Throw(ErrorCode::kPeer, "the job failed before its done");
  return *found;
}

bool TransferView::IsReached(const InFlight& transfer) const {
  const bool has_sent = IsByProgram(transfer.send.marks) && IsSent(transfer);
  return transfer.exchange.first <= words_->reached.host().load() || has_sent ||
         IsComplete(transfer);
}

bool TransferView::HasArrived(const InFlight& transfer) const {
  const int source = transfer.transfer.source;
  if (source < 0 || IsReceived(transfer)) return true;
  if (!transfer.is_pending && !IsByProgram(transfer.receive.marks)) return false;
  const RankChannel& channel = channels_.Incoming(source);
  ChannelWords& words = channel.end->words();
  if (const auto chunk = FirstChunkOf(transfer.receive.route)) {
    return words.tail.at(SlotOf(*chunk)).host().load() >= GenerationOf(*chunk);
  }
  const uint64_t number = transfer.receive.number;
  const auto route = channel.ChosenRoute(number, transfer.transfer.result.size());
  return route == RouteChoices::Route::kZeroCopy && words.ready.host().load() >= number;
}

bool TransferView::HasLeft(const InFlight& transfer) const {
  const int target = transfer.transfer.target;
  if (target < 0 || IsSent(transfer)) return true;
  if (!Is<ZeroCopy>(transfer.send.route)) return false;
  const uint64_t number = transfer.send.number;
  return channels_.Outgoing(target).end->words().TakenOf(number).host().load() >= number;
}

std::span<std::byte> TransferView::MissingOf(const InFlight& transfer) const {
  const std::span<std::byte> result = transfer.transfer.result;
  const uint32_t parts = transfer.transfer.parts;
  if (IsReceived(transfer)) return {};
  const bool is_in_parts = parts > 1 && Is<ZeroCopy>(transfer.receive.route);
  if (transfer.is_pending || !is_in_parts) return result;
  const size_t s = transfer.receive.number % kStreams;
  const uint32_t last = transfer.receive.marks.at(s);
  const uint32_t first = last - parts;
  const uint32_t received = std::clamp(received_.Reached(s), first, last);
  return result.subspan((received - first) * transfer.transfer.part_bytes);
}

}  // namespace jaxhet
