#include "xla_plugin/engine/device_rank.h"

#include <algorithm>
#include <bit>
#include <new>
#include <set>
#include <thread>

#include "xla_plugin/base/error.h"

namespace jaxhet {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kCopyTime{100};  // for a copy of one chunk that has begun

uint32_t Slot(uint64_t chunk) { return static_cast<uint32_t>(chunk % kRingSlots); }

// `number` as a device compares it.
uint32_t DeviceNumber(uint64_t number) {
  if (number >= kOpen) {
    Throw(ErrorCode::kUsage,
          "this process has run out of numbers for its exchanges; run the job again from its last "
          "checkpoint");
  }
  return static_cast<uint32_t>(number);
}

// The value that says that chunk `chunk` is in its slot, or was taken from it.
uint32_t Turn(uint64_t chunk) { return DeviceNumber(chunk / kRingSlots + 1); }

void Pause() { std::this_thread::sleep_for(std::chrono::microseconds(50)); }

template <typename Function>
void ForEachBit(uint64_t bits, Function function) {
  for (; bits != 0; bits &= bits - 1) function(static_cast<size_t>(std::countr_zero(bits)));
}

// What a device may still touch. It is never freed: that would wait for the device.
template <typename T>
void Bury(T&& remains) {
  static auto* const graveyard = new std::deque<std::remove_cvref_t<T>>;
  static auto* const mutex = new std::mutex;
  const std::lock_guard lock(*mutex);
  graveyard->push_back(std::forward<T>(remains));
}

}  // namespace

DeviceRank::DeviceRank(int rank, std::unique_ptr<Device> device)
    : rank_(rank),
      device_(std::move(device)),
      words_memory_(device_->AllocatePinned(sizeof(Words))),
      words_(new (words_memory_.get()) Words{}),
      device_words_(static_cast<std::byte*>(device_->DeviceAddress(words_))),
      rescue_stream_(device_->CreateStream(StreamPriority::kHigh)),
      ready_(device_->CreateEvent()) {
  words_->go_on.value = kOpen;
  for (Stream& stream : send_streams_) stream = device_->CreateStream(StreamPriority::kHigh);
  for (Stream& stream : receive_streams_) stream = device_->CreateStream(StreamPriority::kHigh);
}

DeviceRank::~DeviceRank() {
  bool is_idle = false;
  try {
    is_idle = IsIdle();
  } catch (const Error& error) {
    LogLine(error.what());
  }
  for (Stream& stream : send_streams_) stream = {};
  for (Stream& stream : receive_streams_) stream = {};
  Bury(std::move(words_memory_));  // which the program's stream may still look at
  if (is_idle) return;
  Bury(std::move(outgoing_));
  Bury(std::move(incoming_));
}

void DeviceRank::AddOutgoing(int target, std::unique_ptr<RankRing> ring) {
  outgoing_[target] = std::move(ring);
}

void DeviceRank::AddIncoming(int source, std::unique_ptr<RankRing> ring) {
  incoming_[source] = std::move(ring);
}

void* DeviceRank::AddressOf(const DeviceWord& word) const {
  return device_words_ +
         (reinterpret_cast<const std::byte*>(&word) - reinterpret_cast<const std::byte*>(words_));
}

std::optional<DeviceRank::Mismatch> DeviceRank::Start(const DeviceRequest& request) {
  InFlight exchange{};
  exchange.number = DeviceNumber(started_ + 1);
  exchange.plan = request.plan;
  exchange.index = request.index;
  exchange.deadline_ms = request.deadline_ms;
  exchange.operand_bytes = request.operand.size();
  exchange.result = request.result;
  exchange.poison = request.poison;
  for (size_t i = 0; i + 1 < request.pairs.size(); i += 2) {
    if (request.pairs[i] == rank_) exchange.target = static_cast<int>(request.pairs[i + 1]);
    if (request.pairs[i + 1] == rank_) exchange.source = static_cast<int>(request.pairs[i]);
  }
  const Launch launch{
      .plan = request.plan, .index = request.index, .num_bytes = request.operand.size()};
  if (auto mismatch = Agree(exchange, launch)) return mismatch;
  if (exchange.target >= 0) {
    exchange.sends = StreamsOf(*outgoing_.at(exchange.target), request.operand.size());
  }
  if (exchange.source >= 0) {
    exchange.receives = StreamsOf(*incoming_.at(exchange.source), request.result.size());
  }
  ++started_;
  {
    const std::lock_guard lock(mutex_);
    in_flight_.push_back(exchange);
  }
  if (exchange.source < 0) {
    device_->Fill(request.stream, request.result.data(), std::byte{0}, request.result.size());
  }
  device_->Record(ready_.get(), request.stream);
  if (exchange.source >= 0) Receive(exchange, request.result);
  if (exchange.target >= 0) Send(exchange, request.operand);
  return std::nullopt;
}

// Numbers the exchange on its rings, and compares it with what the peers have launched there.
std::optional<DeviceRank::Mismatch> DeviceRank::Agree(InFlight& exchange, const Launch& launch) {
  std::optional<Mismatch> mismatch;
  const auto compare = [&](int peer_rank, LaunchLog& own, const LaunchLog& peer, uint64_t number) {
    WaitForRoom(peer, number);
    own.Publish(number, launch);
    const auto theirs = peer.Find(number);
    if (theirs && *theirs != launch) mismatch = {peer_rank, launch, *theirs};
  };
  if (exchange.target >= 0) {
    RankRing& ring = RingOf(outgoing_, exchange.target);
    exchange.outgoing_number = ++ring.exchanges;
    RingWords& words = ring.end->words();
    compare(exchange.target, words.source, words.target, exchange.outgoing_number);
  }
  if (exchange.source >= 0) {
    RankRing& ring = RingOf(incoming_, exchange.source);
    exchange.incoming_number = ++ring.exchanges;
    RingWords& words = ring.end->words();
    compare(exchange.source, words.target, words.source, exchange.incoming_number);
  }
  return mismatch;
}

RankRing& DeviceRank::RingOf(Rings& rings, int peer_rank) {
  const auto found = rings.find(peer_rank);
  if (found != rings.end()) return *found->second;
  Throw(ErrorCode::kUsage, "rank ", rank_, " has no ring to or from rank ", peer_rank);
}

// The launch log of a ring is finite. Streams fill up long before it does.
void DeviceRank::WaitForRoom(const LaunchLog& peer, uint64_t number) const {
  while (number > LaunchLog::kEntries && peer.last() < number - LaunchLog::kEntries && !stopped_) {
    Pause();
  }
}

// The streams that the next exchange on the ring has chunks on.
uint64_t DeviceRank::StreamsOf(const RankRing& ring, size_t num_bytes) {
  const bool has_one = num_bytes <= ChunkBytes(num_bytes, ring.end->slot_bytes());
  return has_one ? uint64_t{1} << (ring.chunks % kStreams) : (uint64_t{1} << kStreams) - 1;
}

void DeviceRank::Send(const InFlight& exchange, std::span<const std::byte> operand) {
  RankRing& ring = *outgoing_.at(exchange.target);
  const RingEnd& end = *ring.end;
  const size_t chunk_bytes = ChunkBytes(operand.size(), end.slot_bytes());
  ring.num_bytes += operand.size();
  ForEachBit(exchange.sends,
             [&](size_t s) { device_->WaitEvent(send_streams_.at(s).get(), ready_.get()); });
  if (exchange.source < 0) {
    auto* const first = send_streams_.at(ring.chunks % kStreams).get();
    device_->WriteValue(first, AddressOf(words_->reached), exchange.number);
  }
  do {
    const auto chunk = operand.first(std::min(chunk_bytes, operand.size()));
    operand = operand.subspan(chunk.size());
    auto* const stream = send_streams_.at(ring.chunks % kStreams).get();
    const uint32_t slot = Slot(ring.chunks);
    const uint32_t turn = Turn(ring.chunks++);
    if (end.words().emptied.at(slot).host().load() + 1 < turn) {
      device_->WaitValue(stream, end.emptied(slot), turn - 1);
    }
    device_->Copy(stream, end.slot(slot), chunk.data(), chunk.size());
    device_->WriteValue(stream, end.filled(slot), turn);
  } while (!operand.empty());
  ForEachBit(exchange.sends, [&](size_t s) {
    device_->WriteValue(send_streams_.at(s).get(), AddressOf(words_->sent.at(s)), exchange.number);
  });
}

void DeviceRank::Receive(const InFlight& exchange, std::span<std::byte> result) {
  RankRing& ring = *incoming_.at(exchange.source);
  const RingEnd& end = *ring.end;
  const size_t chunk_bytes = ChunkBytes(result.size(), end.slot_bytes());
  ring.num_bytes += result.size();
  ForEachBit(exchange.receives,
             [&](size_t s) { device_->WaitEvent(receive_streams_.at(s).get(), ready_.get()); });
  auto* const first = receive_streams_.at(ring.chunks % kStreams).get();
  device_->WriteValue(first, AddressOf(words_->reached), exchange.number);
  do {
    const auto chunk = result.first(std::min(chunk_bytes, result.size()));
    result = result.subspan(chunk.size());
    auto* const stream = receive_streams_.at(ring.chunks % kStreams).get();
    const uint32_t slot = Slot(ring.chunks);
    const uint32_t turn = Turn(ring.chunks++);
    device_->WaitValue(stream, end.filled(slot), turn);
    device_->Copy(stream, chunk.data(), end.slot(slot), chunk.size());
    device_->WriteValue(stream, end.emptied(slot), turn);
  } while (!result.empty());
  ForEachBit(exchange.receives, [&](size_t s) {
    auto* const stream = receive_streams_.at(s).get();
    device_->WaitValue(stream, end.gate(), kOpen);
    device_->WriteValue(stream, AddressOf(words_->received.at(s)), exchange.number);
  });
}

void DeviceRank::Done(StreamHandle stream, int64_t plan, int64_t index) {
  InFlight exchange{};
  {
    const std::lock_guard lock(mutex_);
    const auto found = std::ranges::find_if(in_flight_, [&](const InFlight& candidate) {
      return candidate.plan == plan && candidate.index == index && !candidate.is_done;
    });
    if (found == in_flight_.end()) {
      Throw(ErrorCode::kUsage, "exchange ", index, " of plan ", plan, " is done before its start");
    }
    found->is_done = true;
    exchange = *found;
  }
  ForEachBit(exchange.receives, [&](size_t s) {
    device_->WaitValue(stream, AddressOf(words_->received.at(s)), exchange.number);
  });
  ForEachBit(exchange.sends, [&](size_t s) {
    device_->WaitValue(stream, AddressOf(words_->sent.at(s)), exchange.number);
  });
  device_->WaitValue(stream, AddressOf(words_->go_on), exchange.number);
}

bool DeviceRank::IsOver(uint64_t streams, std::array<DeviceWord, kStreams>& words,
                        uint32_t number) {
  bool is_over = true;
  ForEachBit(streams, [&](size_t s) { is_over &= words.at(s).host().load() >= number; });
  return is_over;
}

DeviceRank::Report DeviceRank::Look(milliseconds patience, milliseconds first_patience) {
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
  report.late = FindLate(in_flight_.front(), patience, first_patience);
  return report;
}

void DeviceRank::RecordReached() {
  const uint32_t last = words_->reached.host().load();
  const Time now = Clock::now();
  for (InFlight& exchange : in_flight_) {
    if (exchange.number > last && !IsComplete(exchange)) return;
    if (exchange.reached) continue;
    exchange.reached = now;
    recorder_.Started(RecordOf(exchange, now));
  }
}

void DeviceRank::RecordCompleted() {
  const Time now = Clock::now();
  for (; !in_flight_.empty(); in_flight_.pop_front()) {
    const InFlight& exchange = in_flight_.front();
    if (!exchange.reached || !exchange.is_done || !IsComplete(exchange)) return;
    recorder_.Ended(exchange.number, FlightState::kCompleted, now);
    ++completed_;
    in_flight_time_ += now - *exchange.reached;
    last_completed_ = now;
  }
}

FlightRecord DeviceRank::RecordOf(const InFlight& exchange, Time started) const {
  std::set<int> group = {rank_};
  for (const int partner : {exchange.target, exchange.source}) {
    if (partner >= 0) group.insert(partner);
  }
  return {.id = exchange.number,
          .rank = rank_,
          .kind = ExchangeKind::kPermute,
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
  for (const Rings* const rings : {&outgoing_, &incoming_}) {
    for (const auto& [peer_rank, ring] : *rings) {
      const std::string failure = ring->end->Failure();
      if (failure.empty()) continue;
      return Report::Broken{peer_rank, StrCat("a ring (", ring->transport, ") broke: ", failure)};
    }
  }
  return std::nullopt;
}

bool DeviceRank::IsDrained() const {
  return std::ranges::all_of(outgoing_, [](const auto& entry) {
    const RankRing& ring = *entry.second;
    const uint64_t end = ring.chunks;
    uint64_t chunk = end - std::min<uint64_t>(end, kRingSlots);
    auto& emptied = ring.end->words().emptied;
    while (chunk < end && emptied.at(Slot(chunk)).host().load() >= Turn(chunk)) ++chunk;
    return chunk == end;
  });
}

std::optional<DeviceRank::Wait> DeviceRank::OldestWait(std::span<const int> peer_ranks) const {
  const auto is_asked_for = [&](int rank) {
    return std::ranges::find(peer_ranks, rank) != peer_ranks.end();
  };
  const std::lock_guard lock(mutex_);
  for (const InFlight& exchange : in_flight_) {
    const bool receives = is_asked_for(exchange.source) && !IsReceived(exchange);
    if (!receives && (!is_asked_for(exchange.target) || IsSent(exchange))) continue;
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
  const RingWords& words = incoming_.at(exchange.source)->end->words();
  const auto own = words.target.Find(exchange.incoming_number);
  const auto theirs = words.source.Find(exchange.incoming_number);
  if (!own || !theirs || *own == *theirs) return std::nullopt;
  return Mismatch{exchange.source, *own, *theirs};
}

// The time counts from when the device has reached the exchange, since the host may be far ahead
// of it, and the one before is over.
std::optional<DeviceRank::Report::Late> DeviceRank::FindLate(const InFlight& exchange,
                                                             milliseconds patience,
                                                             milliseconds first_patience) const {
  if (!exchange.reached) return std::nullopt;
  const Time since = std::max(*exchange.reached, last_completed_);
  const auto waited = std::chrono::duration_cast<milliseconds>(Clock::now() - since);
  if (exchange.deadline_ms > 0) patience = milliseconds(exchange.deadline_ms);
  const auto late = [&](int peer_rank, const LaunchLog& peer,
                        uint64_t number) -> std::optional<Report::Late> {
    const bool has_launched = peer.last() >= number;
    const std::optional<Launch> last = peer.Find(peer.last());
    const bool is_there = has_launched || (last && last->plan == exchange.plan);
    if (waited < (is_there ? patience : std::max(patience, first_patience))) return std::nullopt;
    return Report::Late{exchange.plan, exchange.index, peer_rank, has_launched, last, waited};
  };
  if (!IsReceived(exchange)) {
    return late(exchange.source, incoming_.at(exchange.source)->end->words().source,
                exchange.incoming_number);
  }
  if (!IsSent(exchange)) {
    return late(exchange.target, outgoing_.at(exchange.target)->end->words().target,
                exchange.outgoing_number);
  }
  return std::nullopt;
}

void DeviceRank::Stop() {
  if (stopped_.exchange(true)) return;
  words_->go_on.host().store(0);
  for (auto& [target, ring] : outgoing_) ring->end->Cut();
}

bool DeviceRank::Abandon(milliseconds timeout) {
  const Time limit = Clock::now() + timeout;
  // The program has not gone past what has not come by now, and will not.
  std::deque<InFlight> exchanges;
  {
    const std::lock_guard lock(mutex_);
    RecordReached();
    RecordCompleted();
    for (const InFlight& exchange : in_flight_) {
      recorder_.Ended(exchange.number, FlightState::kFailed, Clock::now());
    }
    exchanges = std::exchange(in_flight_, {});
  }
  std::vector<bool> has_come;
  for (const InFlight& exchange : exchanges) has_come.push_back(IsReceived(exchange));
  for (auto& [source, ring] : incoming_) ring->end->Cut();
  std::this_thread::sleep_for(kCopyTime);  // what targets take at the moment
  bool is_over = true;
  for (size_t i = 0; i < exchanges.size() && is_over; ++i) {
    words_->go_on.host().store(exchanges[i].number - 1);  // the program may start this one
    is_over = RunToTheEnd(exchanges[i], limit) && (has_come[i] || Poison(exchanges[i], limit));
  }
  if (is_over) words_->go_on.host().store(kOpen);
  return is_over;
}

// Opens all that our streams may wait for, until they have done their part of the exchange. The
// peers may write the same words.
bool DeviceRank::RunToTheEnd(const InFlight& exchange, Time limit) {
  const auto open = [](std::array<DeviceWord, kRingSlots>& words) {
    for (DeviceWord& word : words) word.host().store(kOpen);
  };
  for (; !IsComplete(exchange) && Clock::now() < limit; Pause()) {
    for (auto& [target, ring] : outgoing_) open(ring->end->words().emptied);
    for (auto& [source, ring] : incoming_) {
      open(ring->end->words().filled);
      ring->end->words().gate.host().store(kOpen);
    }
  }
  return IsComplete(exchange);
}

bool DeviceRank::Poison(const InFlight& exchange, Time limit) {
  auto* const stream = rescue_stream_.get();
  device_->Fill(stream, exchange.result.data(), exchange.poison, exchange.result.size());
  while (!device_->IsIdle(stream) && Clock::now() < limit) Pause();
  return device_->IsIdle(stream);
}

bool DeviceRank::IsIdle() {
  const auto is_idle = [&](const Stream& stream) { return device_->IsIdle(stream.get()); };
  return std::ranges::all_of(send_streams_, is_idle) &&
         std::ranges::all_of(receive_streams_, is_idle);
}

DeviceRank::Counts DeviceRank::counts() const {
  const std::lock_guard lock(mutex_);
  return {started_, completed_, in_flight_time_};
}

std::deque<FlightRecord> DeviceRank::FlightRecords() const {
  const std::lock_guard lock(mutex_);
  return recorder_.records();
}

std::map<std::string_view, std::pair<uint64_t, uint64_t>> DeviceRank::Bytes() const {
  std::map<std::string_view, std::pair<uint64_t, uint64_t>> bytes;
  for (const auto& [target, ring] : outgoing_) bytes[ring->transport].first += ring->num_bytes;
  for (const auto& [source, ring] : incoming_) bytes[ring->transport].second += ring->num_bytes;
  return bytes;
}

}  // namespace jaxhet
