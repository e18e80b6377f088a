#include "xla_plugin/engine/device/device_watch.h"

#include <algorithm>
#include <set>
#include <thread>
#include <utility>

#include "xla_plugin/base/error.h"

namespace jaxhet {
namespace {

using std::chrono::milliseconds;

constexpr std::chrono::microseconds kPause{50};  // between looks at the device
constexpr milliseconds kCopyTime{100};           // for a copy of one chunk that has begun

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
    const bool is_first = transfer.reached && transfer.number == waiting_;
    return DeviceWait{
        .rank = rank_,
        .peer_rank = receives ? source : target,
        .plan = transfer.exchange.plan,
        .index = transfer.exchange.index,
        .since = is_first ? std::max(*transfer.reached, waiting_since_) : Time::max()};
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

// Removes all transfers and records them as failed. They end in the order in which the program
// waits for them; those without a Done() are last. False if there are none.
bool DeviceWatch::FailAll() {
  const std::lock_guard lock(transfers_.mutex);
  RecordReached();
  RecordCompleted();
  const auto begin = std::ssize(remaining_);
  for (const InFlight& transfer : std::exchange(transfers_.all, {})) {
    recorder_.Ended(transfer.exchange.first, FlightState::kFailed, Clock::now());
    const uint32_t done = transfer.done_number;
    remaining_.push_back({transfer, done == 0 ? transfers_.dones + 1 : done, MissingOf(transfer)});
  }
  std::ranges::sort(remaining_.begin() + begin, remaining_.end(), {},
                    [](const Failed& each) { return std::pair(each.turn, each.transfer.number); });
  return begin < std::ssize(remaining_);
}

DeviceWatch::Counts DeviceWatch::counts() const {
  const std::lock_guard lock(transfers_.mutex);
  return {completed_, in_flight_time_};
}

std::deque<FlightRecord> DeviceWatch::FlightRecords() const {
  const std::lock_guard lock(transfers_.mutex);
  return recorder_.records();
}

void DeviceWatch::Stop() {
  if (stopped_.exchange(true)) return;
  words_->go_on.host().store(0);
  for (const auto& [target, channel] : channels_.outgoing()) channel->end->Cut();
}

bool DeviceWatch::Abandon(milliseconds timeout) {
  // The program has not gone past what has not arrived by now, and will not.
  const bool has_failed = FailAll();
  for (const auto& [source, channel] : channels_.incoming()) channel->end->Cut();
  if (has_failed) copied_ = Clock::now() + kCopyTime;
  const Time limit = Clock::now() + timeout;
  std::this_thread::sleep_until(std::min(copied_, limit));
  if (copied_ > limit) return false;
  for (; !remaining_.empty(); remaining_.pop_front()) {
    Failed& first = remaining_.front();
    const InFlight& transfer = first.transfer;
    words_->go_on.host().store(first.turn - 1);  // the program may start this one
    if (!RunToTheEnd(transfer, limit) || !Poison(first, limit)) return false;
    sends_.push_back(transfer.send.marks);
  }
  words_->go_on.host().store(kOpen);
  const auto is_over = [&](const Marks& sends) { return sent_.IsOver(sends); };
  if (!OpenUntil(limit, [&] { return std::ranges::all_of(sends_, is_over); })) return false;
  sends_.clear();
  return true;
}

// Opens all that streams may wait for. The peers may write the same words.
bool DeviceWatch::OpenUntil(Time limit, const std::function<bool()>& is_over) {
  const auto open = [](std::span<DeviceWord> words) {
    for (DeviceWord& word : words) word.host().store(kOpen);
  };
  while (true) {
    for (const auto& [target, channel] : channels_.outgoing()) {
      open(channel->end->words().head);
      open(channel->end->words().taken);
    }
    for (const auto& [source, channel] : channels_.incoming()) {
      ChannelWords& words = channel->end->words();
      open(words.tail);
      open({&words.ready, 1});
      open({&words.intact, 1});
    }
    if (is_over()) return true;
    if (Clock::now() >= limit) return false;
    std::this_thread::sleep_for(kPause);
  }
}

// Until our streams have done their part of the exchange, and the program has come to its start:
// before, the memory of its result is something else's.
bool DeviceWatch::RunToTheEnd(const InFlight& transfer, Time limit) {
  Marks sends = transfer.send.marks;
  sends.at(kDoneStream) = 0;  // which waits for `go_on` first
  return OpenUntil(limit, [&] {
    return sent_.IsOver(sends) &&
           (transfer.is_pending ? IsReached(transfer) : received_.IsOver(transfer.receive.marks));
  });
}

bool DeviceWatch::Poison(Failed& failed, Time limit) {
  const std::span<std::byte> missing = failed.missing;
  if (missing.empty()) return true;
  auto* const stream = stream_.get();
  if (!std::exchange(failed.is_filled, true)) {
    const std::byte poison = failed.transfer.exchange.poison;
    device_.Fill(stream, missing.data(), poison, missing.size());
  }
  while (!device_.IsIdle(stream) && Clock::now() < limit) std::this_thread::sleep_for(kPause);
  return device_.IsIdle(stream);
}

}  // namespace jaxhet
