#include <algorithm>
#include <set>
#include <thread>
#include <utility>

#include "xla_plugin/engine/device_rank.h"

// How the exchanges of a rank are watched, and ended when the job has failed.
namespace jaxhet {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kCopyTime{100};  // for a copy of one chunk that has begun

}  // namespace

bool DeviceRank::IsOver(const Marks& marks, MarkWords& words) {
  bool is_over = true;
  for (size_t s = 0; s < marks.size(); ++s) {
    is_over &= marks.at(s) == 0 || words.at(s).host().load() >= marks.at(s);
  }
  return is_over;
}

bool DeviceRank::HasCome(const InFlight& exchange) const {
  if (exchange.source < 0 || IsReceived(exchange)) return true;
  if (!exchange.is_pending && !IsByProgram(exchange.receives)) return false;
  ChannelWords& words = incoming_.at(exchange.source)->end->words();
  if (exchange.first_chunk) {
    auto& tail = words.tail.at(SlotOf(*exchange.first_chunk));
    return tail.host().load() >= GenerationOf(*exchange.first_chunk);
  }
  return RouteOf(exchange) == RouteChoices::Route::kZeroCopy &&
         words.ready.host().load() >= exchange.incoming_number;
}

bool DeviceRank::HasGone(const InFlight& exchange) const {
  if (exchange.target < 0 || IsSent(exchange)) return true;
  const uint64_t number = exchange.outgoing_number;
  return exchange.is_pulled &&
         outgoing_.at(exchange.target)->end->words().TakenOf(number).host().load() >= number;
}

// Part of the result that has not arrived.
std::span<std::byte> DeviceRank::MissingOf(const InFlight& exchange) const {
  if (IsReceived(exchange)) return {};
  if (exchange.parts == 1 || exchange.is_pending || exchange.first_chunk) return exchange.result;
  const size_t s = exchange.incoming_number % kStreams;
  const uint32_t first = exchange.receives.at(s) - exchange.parts;
  const uint32_t received =
      std::clamp(words_->received.at(s).host().load(), first, exchange.receives.at(s));
  return exchange.result.subspan((received - first) * exchange.part_bytes);
}

DeviceRank::Report DeviceRank::Look(milliseconds wait_budget, milliseconds first_wait_budget) {
  Report report;
  report.broken = FindBroken();
  const std::lock_guard lock(mutex_);
  if (!stopped_) {
    RecordReached();
    RecordCompleted();
  }
  report.in_flight = in_flight_.size();
  if (in_flight_.empty()) return report;
  report.mismatch = FindMismatch(in_flight_.front());
  report.late = FindLate(in_flight_.front(), wait_budget, first_wait_budget);
  return report;
}

// The program, its start.
bool DeviceRank::HasReached(const InFlight& exchange) const {
  const bool has_sent = IsByProgram(exchange.sends) && IsSent(exchange);
  return exchange.first <= words_->reached.host().load() || has_sent || IsComplete(exchange);
}

void DeviceRank::RecordReached() {
  const Time now = Clock::now();
  for (InFlight& exchange : in_flight_) {
    if (!HasReached(exchange)) return;
    if (exchange.reached) continue;
    exchange.reached = now;
    if (exchange.number == exchange.first) recorder_.Started(RecordOf(exchange, now));
  }
}

void DeviceRank::RecordCompleted() {
  const Time now = Clock::now();
  for (; !in_flight_.empty(); in_flight_.pop_front()) {
    const InFlight& exchange = in_flight_.front();
    if (!exchange.reached || !exchange.is_done() || !IsComplete(exchange)) return;
    last_completed_ = now;
    if (!exchange.is_last) continue;
    recorder_.Ended(exchange.first, FlightState::kCompleted, now);
    ++completed_;
    in_flight_time_ += now - *exchange.reached;
  }
}

// Record of the exchange whose first transfer is given.
FlightRecord DeviceRank::RecordOf(const InFlight& exchange, Time started) const {
  std::set<int> group = {rank_};
  for (const InFlight& transfer : in_flight_) {
    if (transfer.first != exchange.number) continue;
    for (const int partner : {transfer.target, transfer.source}) {
      if (partner >= 0) group.insert(partner);
    }
  }
  return {.id = exchange.number,
          .rank = rank_,
          .kind = exchange.kind,
          .plan = exchange.plan,
          .index = exchange.index,
          .run = 0,
          .sequence = exchange.number,
          .operand_bytes = exchange.operand_bytes,
          .group = {group.begin(), group.end()},
          .state = FlightState::kStarted,
          .started = started,
          .ended = {}};
}

std::optional<DeviceRank::Report::Broken> DeviceRank::FindBroken() const {
  for (const Channels* const channels : {&outgoing_, &incoming_}) {
    for (const auto& [peer_rank, channel] : *channels) {
      const std::string failure = channel->end->Failure();
      if (failure.empty()) continue;
      return Report::Broken{peer_rank,
                            StrCat("a device channel (", channel->transport, ") broke: ", failure)};
    }
  }
  return std::nullopt;
}

bool DeviceRank::IsDrained(const std::function<bool(int target)>& is_gone) const {
  return std::ranges::all_of(outgoing_, [&](const auto& entry) {
    const RankChannel& channel = *entry.second;
    ChannelWords& words = channel.end->words();
    auto& passed = channel.end->is_shared() ? words.tail : words.head;
    const uint64_t end = channel.chunks;
    uint64_t chunk = end - std::min<uint64_t>(end, kChannelSlots);
    while (chunk < end && passed.at(SlotOf(chunk)).host().load() >= GenerationOf(chunk)) ++chunk;
    return chunk == end || is_gone(entry.first);
  });
}

std::optional<DeviceRank::Wait> DeviceRank::OldestWait(std::span<const int> peer_ranks) const {
  const auto is_asked_for = [&](int rank) {
    return std::ranges::find(peer_ranks, rank) != peer_ranks.end();
  };
  const std::lock_guard lock(mutex_);
  for (const InFlight& exchange : in_flight_) {
    const bool receives = is_asked_for(exchange.source) && !HasCome(exchange);
    if (!receives && (!is_asked_for(exchange.target) || HasGone(exchange))) continue;
    return Wait{.rank = rank_,
                .peer_rank = receives ? exchange.source : exchange.target,
                .plan = exchange.plan,
                .index = exchange.index,
                .since = exchange.reached.value_or(Time::max())};
  }
  return std::nullopt;
}

std::optional<DeviceRank::Mismatch> DeviceRank::FindMismatch(const InFlight& exchange) const {
  if (exchange.source < 0) return std::nullopt;
  const ChannelWords& words = incoming_.at(exchange.source)->end->words();
  const auto own = words.target.Find(exchange.incoming_number);
  const auto theirs = words.source.Find(exchange.incoming_number);
  if (!own || !theirs || *own == *theirs) return std::nullopt;
  return Mismatch{exchange.source, *own, *theirs};
}

// The time counts from when the device has reached the exchange, since the host may be far ahead
// of it, and the one before is over.
std::optional<DeviceRank::Report::Late> DeviceRank::FindLate(const InFlight& exchange,
                                                             milliseconds wait_budget,
                                                             milliseconds first_wait_budget) const {
  if (!exchange.reached) return std::nullopt;
  const Time since = std::max(*exchange.reached, last_completed_);
  const auto waited = std::chrono::duration_cast<milliseconds>(Clock::now() - since);
  if (exchange.deadline_ms > 0) wait_budget = milliseconds(exchange.deadline_ms);
  const auto late = [&](int peer_rank, const LaunchLog& peer,
                        uint64_t number) -> std::optional<Report::Late> {
    const bool has_launched = peer.last() >= number;
    const std::optional<Launch> last = peer.Find(peer.last());
    const bool is_there = has_launched || (last && last->plan == exchange.plan);
    if (waited < (is_there ? wait_budget : std::max(wait_budget, first_wait_budget)))
      return std::nullopt;
    return Report::Late{exchange.plan, exchange.index, peer_rank, has_launched, last, waited};
  };
  if (!HasCome(exchange)) {
    return late(exchange.source, incoming_.at(exchange.source)->end->words().source,
                exchange.incoming_number);
  }
  if (!HasGone(exchange)) {
    return late(exchange.target, outgoing_.at(exchange.target)->end->words().target,
                exchange.outgoing_number);
  }
  return std::nullopt;
}

void DeviceRank::Stop() {
  if (stopped_.exchange(true)) return;
  words_->go_on.host().store(0);
  for (auto& [target, channel] : outgoing_) channel->end->Cut();
}

bool DeviceRank::Abandon(milliseconds timeout) {
  const Time limit = Clock::now() + timeout;
  // The program has not gone past what has not come by now, and will not.
  std::deque<InFlight> exchanges;
  uint32_t dones = 0;
  {
    const std::lock_guard lock(mutex_);
    RecordReached();
    RecordCompleted();
    for (const InFlight& exchange : in_flight_) {
      recorder_.Ended(exchange.first, FlightState::kFailed, Clock::now());
    }
    exchanges = std::exchange(in_flight_, {});
    dones = dones_;
  }
  // In the order in which the program waits for them; exchanges without a Done() are last.
  const auto turn_of = [&](const InFlight& exchange) {
    return exchange.done_number == 0 ? dones + 1 : exchange.done_number;
  };
  std::ranges::sort(exchanges, {}, [&](const InFlight& exchange) {
    return std::pair(turn_of(exchange), exchange.number);
  });
  std::vector<std::span<std::byte>> missing;
  for (const InFlight& exchange : exchanges) missing.push_back(MissingOf(exchange));
  for (auto& [source, channel] : incoming_) channel->end->Cut();
  std::this_thread::sleep_for(kCopyTime);  // targets finish the copies under way
  bool is_over = true;
  for (size_t i = 0; i < exchanges.size() && is_over; ++i) {
    words_->go_on.host().store(turn_of(exchanges[i]) - 1);  // the program may start this one
    is_over = RunToTheEnd(exchanges[i], limit) && Poison(exchanges[i], missing[i], limit);
  }
  if (!is_over) return false;
  words_->go_on.host().store(kOpen);
  return OpenUntil(limit, [&] {
    return std::ranges::all_of(
        exchanges, [&](const InFlight& each) { return IsOver(each.sends, words_->sent); });
  });
}

// Opens all that streams may wait for. The peers may write the same words.
bool DeviceRank::OpenUntil(Time limit, const std::function<bool()>& is_over) {
  const auto open = [](std::span<DeviceWord> words) {
    for (DeviceWord& word : words) word.host().store(kOpen);
  };
  while (true) {
    for (auto& [target, channel] : outgoing_) {
      open(channel->end->words().head);
      open(channel->end->words().taken);
    }
    for (auto& [source, channel] : incoming_) {
      ChannelWords& words = channel->end->words();
      open(words.tail);
      open({&words.ready, 1});
      open({&words.abort_flag, 1});
    }
    if (is_over()) return true;
    if (Clock::now() >= limit) return false;
    std::this_thread::sleep_for(kPause);
  }
}

// Until our streams have done their part of the exchange, and the program has come to its start:
// before, the memory of its result is something else's.
bool DeviceRank::RunToTheEnd(const InFlight& exchange, Time limit) {
  Marks sends = exchange.sends;
  if (exchange.is_pulled) sends.at(kProgram) = 0;  // the program goes on first
  return OpenUntil(limit, [&] {
    return IsOver(sends, words_->sent) &&
           (exchange.is_pending ? HasReached(exchange)
                                : IsOver(exchange.receives, words_->received));
  });
}

bool DeviceRank::Poison(const InFlight& exchange, std::span<std::byte> missing, Time limit) {
  if (missing.empty()) return true;
  auto* const stream = rescue_stream_.get();
  device_->Fill(stream, missing.data(), exchange.poison, missing.size());
  while (!device_->IsIdle(stream) && Clock::now() < limit) std::this_thread::sleep_for(kPause);
  return device_->IsIdle(stream);
}

bool DeviceRank::IsIdle() {
  const auto is_idle = [&](const Stream& stream) { return device_->IsIdle(stream.get()); };
  return std::ranges::all_of(send_streams_, is_idle) &&
         std::ranges::all_of(receive_streams_, is_idle);
}

DeviceRank::Counts DeviceRank::counts() const {
  const std::lock_guard lock(mutex_);
  return {started_, completed_, in_flight_time_, pulled_bytes_, in_place_bytes_};
}

std::deque<FlightRecord> DeviceRank::FlightRecords() const {
  const std::lock_guard lock(mutex_);
  return recorder_.records();
}

std::vector<DeviceRank::ChannelBytes> DeviceRank::Bytes() const {
  std::vector<ChannelBytes> bytes;
  for (const auto& [target, channel] : outgoing_)
    bytes.push_back(
        {.peer_rank = target, .transport = channel->transport, .sent = channel->num_bytes});
  for (const auto& [source, channel] : incoming_)
    bytes.push_back(
        {.peer_rank = source, .transport = channel->transport, .received = channel->num_bytes});
  return bytes;
}

}  // namespace jaxhet
