#include "xla_plugin/engine/device/device_watch.h"

#include <algorithm>
#include <set>
#include <utility>

#include "xla_plugin/base/error.h"

namespace jaxhet {
namespace {

using std::chrono::milliseconds;

}  // namespace

bool DeviceWatch::IsReached(const InFlight& transfer) const {
  const bool has_sent = IsByProgram(transfer.send.marks) && IsSent(transfer);
  return transfer.exchange.first <= words_->reached.host().load() || has_sent ||
         IsComplete(transfer);
}

bool DeviceWatch::HasArrived(const InFlight& transfer) const {
  const int source = transfer.transfer.source;
  if (source < 0 || IsReceived(transfer)) return true;
  if (!transfer.is_pending && !IsByProgram(transfer.receive.marks)) return false;
  const RankChannel& channel = channels_.Incoming(source);
  ChannelWords& words = channel.end->words();
  if (transfer.receive.route.has_chunks()) {
    const uint64_t chunk = transfer.receive.route.first_chunk;
    return words.tail.at(SlotOf(chunk)).host().load() >= GenerationOf(chunk);
  }
  const uint64_t number = transfer.receive.number;
  const auto route = channel.ChosenRoute(number, transfer.transfer.result.size());
  return route == RouteChoices::Route::kZeroCopy && words.ready.host().load() >= number;
}

bool DeviceWatch::HasLeft(const InFlight& transfer) const {
  const int target = transfer.transfer.target;
  if (target < 0 || IsSent(transfer)) return true;
  if (!transfer.send.route.is_zero_copy()) return false;
  const uint64_t number = transfer.send.number;
  return channels_.Outgoing(target).end->words().TakenOf(number).host().load() >= number;
}

std::span<std::byte> DeviceWatch::MissingOf(const InFlight& transfer) const {
  const std::span<std::byte> result = transfer.transfer.result;
  const uint32_t parts = transfer.transfer.parts;
  if (IsReceived(transfer)) return {};
  const bool is_in_parts = parts > 1 && transfer.receive.route.is_zero_copy();
  if (transfer.is_pending || !is_in_parts) return result;
  const size_t s = transfer.receive.number % kStreams;
  const uint32_t last = transfer.receive.marks.at(s);
  const uint32_t first = last - parts;
  const uint32_t received = std::clamp(received_.Reached(s), first, last);
  return result.subspan((received - first) * transfer.transfer.part_bytes);
}

WatchReport DeviceWatch::Look(milliseconds wait_budget, milliseconds first_wait_budget) {
  WatchReport report;
  report.broken = FindBroken();
  const std::lock_guard lock(transfers_.mutex);
  if (!stopped_) {
    RecordReached();
    RecordCompleted();
  }
  report.in_flight = transfers_.all.size();
  if (transfers_.all.empty()) return report;
  for (const InFlight& transfer : transfers_.all) {
    if (!report.mismatch) report.mismatch = FindMismatch(transfer);
  }
  // Earlier transfers need nothing more of peers. They may wait for a later Done().
  const auto waiting = std::ranges::find_if(transfers_.all, [&](const InFlight& transfer) {
    return !HasArrived(transfer) || !HasLeft(transfer);
  });
  if (waiting == transfers_.all.end()) return report;
  if (std::exchange(waiting_, waiting->number) != waiting->number) waiting_since_ = Clock::now();
  report.late = FindLate(*waiting, wait_budget, first_wait_budget);
  return report;
}

void DeviceWatch::RecordReached() {
  const Time now = Clock::now();
  for (InFlight& transfer : transfers_.all) {
    if (!IsReached(transfer)) return;
    if (transfer.reached) continue;
    transfer.reached = now;
    if (transfer.number == transfer.exchange.first) recorder_.Started(RecordOf(transfer, now));
  }
}

void DeviceWatch::RecordCompleted() {
  const Time now = Clock::now();
  for (; !transfers_.all.empty(); transfers_.all.pop_front()) {
    const InFlight& transfer = transfers_.all.front();
    if (!transfer.reached || !transfer.is_done() || !IsComplete(transfer)) return;
    if (!transfer.is_last) continue;
    recorder_.Ended(transfer.exchange.first, FlightState::kCompleted, now);
    ++completed_;
    in_flight_time_ += now - *transfer.reached;
  }
}

// Record of the exchange whose first transfer is given.
FlightRecord DeviceWatch::RecordOf(const InFlight& transfer, Time started) const {
  std::set<int> group = {rank_};
  for (const InFlight& other : transfers_.all) {
    if (other.exchange.first != transfer.number) continue;
    for (const int partner : {other.transfer.target, other.transfer.source}) {
      if (partner >= 0) group.insert(partner);
    }
  }
  return {.id = transfer.number,
          .rank = rank_,
          .kind = transfer.exchange.kind,
          .plan = transfer.exchange.plan,
          .index = transfer.exchange.index,
          .run = 0,
          .sequence = transfer.number,
          .operand_bytes = transfer.exchange.operand_bytes,
          .group = {group.begin(), group.end()},
          .state = FlightState::kStarted,
          .started = started,
          .ended = {}};
}

std::optional<BrokenChannel> DeviceWatch::FindBroken() const {
  for (const auto& channels : {channels_.outgoing(), channels_.incoming()}) {
    for (const auto& [peer_rank, channel] : channels) {
      const std::string failure = channel->end->Failure();
      if (failure.empty()) continue;
      return BrokenChannel{peer_rank,
                           StrCat("a device channel (", channel->transport, ") broke: ", failure)};
    }
  }
  return std::nullopt;
}

bool DeviceWatch::IsDrained(const std::function<bool(int target)>& is_gone) const {
  return std::ranges::all_of(channels_.outgoing(), [&](const auto& entry) {
    const RankChannel& channel = *entry.second;
    ChannelWords& words = channel.end->words();
    auto& passed = channel.end->is_shared() ? words.tail : words.head;
    const uint64_t end = channel.chunks;
    uint64_t chunk = end - std::min<uint64_t>(end, kChannelSlots);
    while (chunk < end && passed.at(SlotOf(chunk)).host().load() >= GenerationOf(chunk)) ++chunk;
    return chunk == end || is_gone(entry.first);
  });
}

std::optional<DeviceWait> DeviceWatch::OldestWait(std::span<const int> peer_ranks) const {
  const auto is_asked_for = [&](int rank) {
    return std::ranges::find(peer_ranks, rank) != peer_ranks.end();
  };
  const std::lock_guard lock(transfers_.mutex);
  for (const InFlight& transfer : transfers_.all) {
    const auto [source, target] = std::pair(transfer.transfer.source, transfer.transfer.target);
    const bool receives = is_asked_for(source) && !HasArrived(transfer);
    if (!receives && (!is_asked_for(target) || HasLeft(transfer))) continue;
    return DeviceWait{.rank = rank_,
                      .peer_rank = receives ? source : target,
                      .plan = transfer.exchange.plan,
                      .index = transfer.exchange.index,
                      .since = transfer.reached.value_or(Time::max())};
  }
  return std::nullopt;
}

std::optional<LaunchMismatch> DeviceWatch::FindMismatch(const InFlight& transfer) const {
  const int source = transfer.transfer.source;
  if (source < 0) return std::nullopt;
  const DeviceChannel& end = *channels_.Incoming(source).end;
  const auto own = end.target_log().Find(transfer.receive.number);
  const auto theirs = end.source_log().Find(transfer.receive.number);
  if (!own || !theirs || *own == *theirs) return std::nullopt;
  return LaunchMismatch{source, *own, *theirs};
}

// The time counts from the moment when the device has reached the exchange, since the host may be
// far ahead of it, and no earlier exchange waits for a peer any more.
std::optional<LateTransfer> DeviceWatch::FindLate(const InFlight& transfer,
                                                  milliseconds wait_budget,
                                                  milliseconds first_wait_budget) const {
  if (!transfer.reached) return std::nullopt;
  const InFlight::Whole& exchange = transfer.exchange;
  const Time since = std::max(*transfer.reached, waiting_since_);
  const auto waited = std::chrono::duration_cast<milliseconds>(Clock::now() - since);
  if (exchange.deadline_ms > 0) wait_budget = milliseconds(exchange.deadline_ms);
  const auto late = [&](int peer_rank, const LaunchLog& peer,
                        uint64_t number) -> std::optional<LateTransfer> {
    const bool has_launched = peer.last() >= number;
    const std::optional<Launch> last = peer.Find(peer.last());
    const bool is_there = has_launched || (last && last->plan == exchange.plan);
    if (waited < (is_there ? wait_budget : std::max(wait_budget, first_wait_budget)))
      return std::nullopt;
    return LateTransfer{exchange.plan, exchange.index, peer_rank, has_launched, last, waited};
  };
  const auto [source, target] = std::pair(transfer.transfer.source, transfer.transfer.target);
  if (!HasArrived(transfer)) {
    return late(source, channels_.Incoming(source).end->source_log(), transfer.receive.number);
  }
  if (!HasLeft(transfer)) {
    return late(target, channels_.Outgoing(target).end->target_log(), transfer.send.number);
  }
  return std::nullopt;
}

std::deque<DeviceWatch::Failed> DeviceWatch::FailAll() {
  const std::lock_guard lock(transfers_.mutex);
  RecordReached();
  RecordCompleted();
  std::deque<Failed> failed;
  for (const InFlight& transfer : std::exchange(transfers_.all, {})) {
    recorder_.Ended(transfer.exchange.first, FlightState::kFailed, Clock::now());
    const uint32_t done = transfer.done_number;
    failed.push_back({transfer, done == 0 ? transfers_.dones + 1 : done, MissingOf(transfer)});
  }
  std::ranges::sort(failed, {},
                    [](const Failed& each) { return std::pair(each.turn, each.transfer.number); });
  return failed;
}

DeviceWatch::Counts DeviceWatch::counts() const {
  const std::lock_guard lock(transfers_.mutex);
  return {completed_, in_flight_time_};
}

std::deque<FlightRecord> DeviceWatch::FlightRecords() const {
  const std::lock_guard lock(transfers_.mutex);
  return recorder_.records();
}

}  // namespace jaxhet
