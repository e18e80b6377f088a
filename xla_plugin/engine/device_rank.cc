#include "xla_plugin/engine/device_rank.h"

#include <algorithm>
#include <thread>

#include "xla_plugin/base/error.h"

namespace jaxhet {
namespace {

using std::chrono::milliseconds;

uint32_t Slot(uint64_t chunk) { return static_cast<uint32_t>(chunk % kRingSlots); }

// The value that says that chunk `chunk` is in its slot, or was taken from it.
uint32_t Turn(uint64_t chunk) {
  const uint64_t turn = chunk / kRingSlots + 1;
  if (turn >= kOpen) {
    Throw(ErrorCode::kUsage,
          "this job has run out of numbers for its exchanges; run it again from "
          "its last checkpoint");
  }
  return static_cast<uint32_t>(turn);
}

void Pause() { std::this_thread::sleep_for(std::chrono::microseconds(50)); }

void OpenAll(std::array<RingWords::Word, kRingSlots>& words) {
  for (RingWords::Word& word : words) HostWord(word).store(kOpen);
}

}  // namespace

DeviceRank::DeviceRank(int rank, std::unique_ptr<Device> device)
    : rank_(rank),
      device_(std::move(device)),
      send_stream_(device_->CreateStream(StreamPriority::kHigh)),
      receive_stream_(device_->CreateStream(StreamPriority::kHigh)),
      rescue_stream_(device_->CreateStream(StreamPriority::kHigh)) {}

DeviceRank::~DeviceRank() = default;

std::optional<DeviceRank::Mismatch> DeviceRank::Start(const DeviceRequest& request) {
  const std::lock_guard lock(mutex_);
  InFlight exchange;
  exchange.request = request;
  for (const auto [source, target] : request.pairs) {
    if (source == rank_) exchange.target = target;
    if (target == rank_) exchange.source = source;
  }
  const Launch launch{
      .plan = request.plan, .index = request.index, .num_bytes = request.operand.size()};
  if (auto mismatch = Agree(exchange, launch)) return mismatch;

  ++started_;
  exchange.ready = TakeEvent();
  device_->Record(exchange.ready.get(), request.stream);
  if (exchange.target >= 0) {
    device_->WaitEvent(send_stream_.get(), exchange.ready.get());
    Send(outgoing_.at(exchange.target), request.operand);
    exchange.sent = TakeEvent();
    device_->Record(exchange.sent.get(), send_stream_.get());
  }
  if (exchange.source >= 0) {
    device_->WaitEvent(receive_stream_.get(), exchange.ready.get());
    Receive(incoming_.at(exchange.source), exchange);
    exchange.received = TakeEvent();
    device_->Record(exchange.received.get(), receive_stream_.get());
  } else {
    device_->Fill(request.stream, request.result.data(), std::byte{0}, request.result.size());
  }
  in_flight_.push_back(std::move(exchange));
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
    RankRing& ring = RingTo(exchange.target);
    exchange.outgoing_number = ++ring.exchanges;
    RingWords& words = ring.end->words();
    compare(exchange.target, words.source, words.target, exchange.outgoing_number);
  }
  if (exchange.source >= 0) {
    RankRing& ring = RingFrom(exchange.source);
    exchange.incoming_number = ++ring.exchanges;
    RingWords& words = ring.end->words();
    compare(exchange.source, words.target, words.source, exchange.incoming_number);
  }
  return mismatch;
}

RankRing& DeviceRank::RingTo(int target) { return RingOf(outgoing_, target); }
RankRing& DeviceRank::RingFrom(int source) { return RingOf(incoming_, source); }

RankRing& DeviceRank::RingOf(std::map<int, RankRing>& rings, int peer_rank) {
  const auto found = rings.find(peer_rank);
  if (found != rings.end()) return found->second;
  Throw(ErrorCode::kUsage, "rank ", rank_, " has no ring to or from rank ", peer_rank);
}

// The launch log of a ring is finite. Streams fill up long before it does.
void DeviceRank::WaitForRoom(const LaunchLog& peer, uint64_t number) const {
  while (number > LaunchLog::kEntries && peer.last() < number - LaunchLog::kEntries && !stopped_) {
    Pause();
  }
}

void DeviceRank::Send(RankRing& ring, std::span<const std::byte> operand) {
  const RingEnd& end = *ring.end;
  const size_t chunk_bytes = ChunkBytes(operand.size(), end.slot_bytes());
  ring.num_bytes += operand.size();
  do {
    const auto chunk = operand.first(std::min(chunk_bytes, operand.size()));
    operand = operand.subspan(chunk.size());
    const uint32_t slot = Slot(ring.chunks);
    const uint32_t turn = Turn(ring.chunks++);
    if (HostWord(end.words().emptied.at(slot)).load() + 1 < turn) {
      device_->WaitValue(send_stream_.get(), end.emptied(slot), turn - 1);
    }
    device_->Copy(send_stream_.get(), end.slot(slot), chunk.data(), chunk.size());
    device_->WriteValue(send_stream_.get(), end.filled(slot), turn);
  } while (!operand.empty());
}

void DeviceRank::Receive(RankRing& ring, InFlight& exchange) {
  const RingEnd& end = *ring.end;
  std::span<std::byte> result = exchange.request.result;
  const size_t chunk_bytes = ChunkBytes(result.size(), end.slot_bytes());
  ring.num_bytes += result.size();
  do {
    const auto chunk = result.first(std::min(chunk_bytes, result.size()));
    result = result.subspan(chunk.size());
    const uint32_t slot = Slot(ring.chunks);
    const uint32_t turn = Turn(ring.chunks++);
    device_->WaitValue(receive_stream_.get(), end.filled(slot), turn);
    device_->Copy(receive_stream_.get(), chunk.data(), end.slot(slot), chunk.size());
    device_->WriteValue(receive_stream_.get(), end.emptied(slot), turn);
  } while (!result.empty());
  exchange.arrived = TakeEvent();
  device_->Record(exchange.arrived.get(), receive_stream_.get());
  const auto number = static_cast<uint32_t>(std::min<uint64_t>(exchange.incoming_number, kOpen));
  device_->WaitValue(receive_stream_.get(), end.gate(), number);
}

Event DeviceRank::TakeEvent() {
  if (events_.empty()) return device_->CreateEvent();
  Event event = std::move(events_.back());
  events_.pop_back();
  return event;
}

void DeviceRank::Done(StreamHandle stream, int64_t plan, int64_t index) {
  const std::lock_guard lock(mutex_);
  const auto found = std::ranges::find_if(in_flight_, [&](const InFlight& exchange) {
    return exchange.request.plan == plan && exchange.request.index == index && !exchange.is_done;
  });
  if (found == in_flight_.end()) {
    Throw(ErrorCode::kUsage, "exchange ", index, " of plan ", plan, " is done before its start");
  }
  if (found->target >= 0) device_->WaitEvent(stream, found->sent.get());
  if (found->source >= 0) device_->WaitEvent(stream, found->received.get());
  found->is_done = true;
}

bool DeviceRank::IsComplete(const InFlight& exchange) {
  return (exchange.target < 0 || device_->IsDone(exchange.sent.get())) &&
         (exchange.source < 0 || device_->IsDone(exchange.received.get()));
}

DeviceRank::Report DeviceRank::Look(milliseconds patience, milliseconds first_patience) {
  Report report;
  const std::lock_guard lock(mutex_);
  while (!in_flight_.empty() && in_flight_.front().is_done && IsComplete(in_flight_.front())) {
    InFlight& exchange = in_flight_.front();
    events_.push_back(std::move(exchange.ready));
    if (exchange.target >= 0) events_.push_back(std::move(exchange.sent));
    if (exchange.source >= 0) {
      events_.push_back(std::move(exchange.arrived));
      events_.push_back(std::move(exchange.received));
    }
    in_flight_.pop_front();
    ++report.completed;
  }
  report.in_flight = in_flight_.size();
  CheckRings();
  if (in_flight_.empty()) return report;
  report.mismatch = FindMismatch(in_flight_.front());
  report.late = FindLate(in_flight_.front(), patience, first_patience);
  return report;
}

void DeviceRank::CheckRings() const {
  const auto check = [](int peer_rank, const RankRing& ring) {
    const std::string failure = ring.end->Failure();
    if (failure.empty()) return;
    Throw(ErrorCode::kTransport, "the ring (", ring.transport, ") to or from rank ", peer_rank,
          " is broken: ", failure);
  };
  for (const auto& [target, ring] : outgoing_) check(target, ring);
  for (const auto& [source, ring] : incoming_) check(source, ring);
}

std::optional<DeviceRank::Mismatch> DeviceRank::FindMismatch(const InFlight& exchange) const {
  if (exchange.source < 0) return std::nullopt;
  const RingWords& words = incoming_.at(exchange.source).end->words();
  const auto own = words.target.Find(exchange.incoming_number);
  const auto theirs = words.source.Find(exchange.incoming_number);
  if (!own || !theirs || *own == *theirs) return std::nullopt;
  return Mismatch{exchange.source, *own, *theirs};
}

// The time counts from when the device has reached the exchange: the host may be far ahead of it.
std::optional<DeviceRank::Report::Late> DeviceRank::FindLate(InFlight& exchange,
                                                             milliseconds patience,
                                                             milliseconds first_patience) {
  if (!exchange.reached) {
    if (device_->IsDone(exchange.ready.get())) exchange.reached = Clock::now();
    return std::nullopt;
  }
  const auto waited = std::chrono::duration_cast<milliseconds>(Clock::now() - *exchange.reached);
  const DeviceRequest& request = exchange.request;
  if (request.deadline_ms > 0) patience = milliseconds(request.deadline_ms);
  const auto late = [&](int peer_rank, const LaunchLog& peer,
                        uint64_t number) -> std::optional<Report::Late> {
    const bool has_launched = peer.last() >= number;
    const std::optional<Launch> last = peer.Find(peer.last());
    const bool is_there = has_launched || (last && last->plan == request.plan);
    if (waited < (is_there ? patience : std::max(patience, first_patience))) return std::nullopt;
    return Report::Late{request.plan, request.index, peer_rank, has_launched, last, waited};
  };
  if (exchange.source >= 0 && !device_->IsDone(exchange.received.get())) {
    return late(exchange.source, incoming_.at(exchange.source).end->words().source,
                exchange.incoming_number);
  }
  if (exchange.target >= 0 && !device_->IsDone(exchange.sent.get())) {
    return late(exchange.target, outgoing_.at(exchange.target).end->words().target,
                exchange.outgoing_number);
  }
  return std::nullopt;
}

bool DeviceRank::Abandon(milliseconds timeout) {
  stopped_ = true;
  const std::lock_guard lock(mutex_);
  const Time limit = Clock::now() + timeout;
  // What this rank sends from here on may overwrite what its targets have not taken yet, and what
  // it receives may be that of a source which does the same.
  for (auto& [target, ring] : outgoing_) HostWord(ring.end->words().gate).store(0);
  for (auto& [source, ring] : incoming_) HostWord(ring.end->words().gate).store(0);
  const auto let_sends_go = [&] {
    for (auto& [target, ring] : outgoing_) OpenAll(ring.end->words().emptied);
  };
  let_sends_go();
  for (InFlight& exchange : in_flight_) {
    if (exchange.source >= 0) Poison(exchange, limit);
  }
  while (!device_->IsIdle(send_stream_.get()) && Clock::now() < limit) {
    let_sends_go();
    Pause();
  }
  return device_->IsIdle(send_stream_.get()) && device_->IsIdle(receive_stream_.get());
}

// Lets the chunks of one exchange come as they are, overwrites the result, then opens the gate.
// The peer may write the same words: they are written until the device has seen them.
void DeviceRank::Poison(InFlight& exchange, Time limit) {
  RingWords& words = incoming_.at(exchange.source).end->words();
  const auto is_over = [&] {
    return device_->IsDone(exchange.received.get()) || Clock::now() >= limit;
  };
  while (!is_over() && !device_->IsDone(exchange.arrived.get())) {
    OpenAll(words.filled);
    Pause();
  }
  if (is_over()) return;
  const DeviceRequest& request = exchange.request;
  device_->Fill(rescue_stream_.get(), request.result.data(), request.poison, request.result.size());
  while (!device_->IsIdle(rescue_stream_.get()) && Clock::now() < limit) Pause();
  while (!is_over()) {
    HostWord(words.gate).store(static_cast<uint32_t>(exchange.incoming_number));
    Pause();
  }
}

std::map<std::string_view, std::pair<uint64_t, uint64_t>> DeviceRank::Bytes() const {
  const std::lock_guard lock(mutex_);
  std::map<std::string_view, std::pair<uint64_t, uint64_t>> bytes;
  for (const auto& [target, ring] : outgoing_) bytes[ring.transport].first += ring.num_bytes;
  for (const auto& [source, ring] : incoming_) bytes[ring.transport].second += ring.num_bytes;
  return bytes;
}

}  // namespace jaxhet
