#include "xla_plugin/engine/device/receive_queue.h"

#include <algorithm>
#include <thread>
#include <utility>

namespace jaxhet {
namespace {

// How long ReceiveUntil() waits for sources' launches: at most so long, and in vain for this part
// of all time. That is enough to bring processes together that launch at the same pace.
constexpr std::chrono::milliseconds kMaxLaunchWait{10};
constexpr int kLaunchWaitFraction = 8;

}  // namespace

std::vector<InFlight> ReceiveQueue::Choose(InFlight& transfer, bool may_be_eager) {
  const int source = transfer.transfer.source;
  const size_t num_bytes = transfer.transfer.result.size();
  RankChannel& channel = channels_.Incoming(source);
  const auto chosen = channel.ChosenRoute(transfer.receive.number, num_bytes);
  if (!chosen) return {};
  Route& route = transfer.receive.route;
  if (*chosen == RouteChoices::Route::kZeroCopy) {
    route.kind = Route::Kind::kZeroCopy;
    return {};
  }
  const bool is_eager = may_be_eager && channel.IsShort(num_bytes);
  route = {is_eager ? Route::Kind::kEager : Route::Kind::kSlots, channel.chunks};
  channel.chunks += NumChunks(num_bytes, channel.end->slot_bytes());
  return TakeOverdue(source, channel.chunks);
}

// Eager messages whose slots are used again by chunks before `end`; our streams receive them.
std::vector<InFlight> ReceiveQueue::TakeOverdue(int source, uint64_t end) {
  std::vector<InFlight> overdue;
  const std::lock_guard lock(transfers_.mutex);
  for (InFlight& other : transfers_.all) {
    Route& route = other.receive.route;
    if (!route.is_eager() || !other.is_pending || other.transfer.source != source) continue;
    if (route.first_chunk + kChannelSlots >= end) continue;
    route.kind = Route::Kind::kSlots;
    overdue.push_back(other);
  }
  return overdue;
}

// Receipts whose chunks are numbered are first: they use their slots before all others.
void ReceiveQueue::Add(const InFlight& transfer, Event ready) {
  if (transfer.receive.route.has_chunks()) {
    receipts_.push_front({transfer, std::move(ready)});
  } else {
    receipts_.push_back({transfer, std::move(ready)});
  }
  ReceiveKnown();
}

void ReceiveQueue::ReceiveKnown() {
  while (!receipts_.empty()) {
    InFlight& first = receipts_.front().transfer;
    std::vector<InFlight> overdue;
    if (first.receive.route.is_none()) overdue = Choose(first, false);
    if (first.receive.route.is_none()) return;
    Receipt receipt = std::move(receipts_.front());
    receipts_.pop_front();
    for (const InFlight& other : overdue) Receive(other, receipt.ready.get());
    Receive(receipt.transfer, receipt.ready.get());
    runner_.Recycle(std::move(receipt.ready));
  }
}

void ReceiveQueue::Receive(const InFlight& transfer, EventHandle ready) {
  InFlight marked;
  {
    const std::lock_guard lock(transfers_.mutex);
    const auto found = std::ranges::find(transfers_.all, transfer.number, &InFlight::number);
    if (found == transfers_.all.end()) return;  // it has been abandoned
    InFlight::Side& receive = found->receive;
    found->is_pending = false;
    receive.route = transfer.receive.route;
    if (receive.route.has_chunks()) {
      const RankChannel& channel = channels_.Incoming(transfer.transfer.source);
      const size_t num_bytes = transfer.transfer.result.size();
      receive.marks = received_.NextForChunks(receive.route.first_chunk,
                                              NumChunks(num_bytes, channel.end->slot_bytes()));
    } else {
      const size_t s = receive.number % kStreams;
      receive.marks.at(s) = received_.NextFor(s, found->transfer.parts);
    }
    marked = *found;
  }
  if (marked.receive.route.is_zero_copy()) {
    runner_.Get(marked, channels_.Incoming(marked.transfer.source), ready);
  } else {
    runner_.Receive(marked, channels_.Incoming(marked.transfer.source), nullptr, ready);
  }
}

void ReceiveQueue::ReceiveUntil(uint32_t number) {
  const auto are_left = [&] {
    return !receipts_.empty() && receipts_.front().transfer.number <= number;
  };
  ReceiveKnown();
  if (!are_left()) return;
  const Time begin = Clock::now();
  const Clock::duration wait_budget =
      std::min<Clock::duration>(kMaxLaunchWait, (begin - gave_up_at_) / kLaunchWaitFraction);
  bool gave_up = false;
  while (are_left()) {
    gave_up |= rescue_.stopped() || Clock::now() - begin >= wait_budget;
    if (gave_up) {
      const InFlight& first = receipts_.front().transfer;
      const RankChannel& channel = channels_.Incoming(first.transfer.source);
      channel.end->routes().Choose(first.receive.number, RouteChoices::Route::kSlots);
    } else {
      std::this_thread::yield();
    }
    ReceiveKnown();
  }
  if (gave_up) gave_up_at_ = Clock::now();
}

}  // namespace jaxhet
