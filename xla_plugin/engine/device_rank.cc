#include "xla_plugin/engine/device_rank.h"

#include <algorithm>
#include <deque>
#include <new>
#include <thread>

#include "xla_plugin/base/error.h"

namespace jaxhet {
namespace {

constexpr std::chrono::microseconds kPause{50};

uint32_t Next(uint32_t& last) { return last = DeviceNumber(uint64_t{last} + 1); }

template <typename Marks, typename Function>
void ForEachStream(const Marks& marks, Function function) {
  for (size_t s = 0; s < marks.size(); ++s) {
    if (marks.at(s) != 0) function(s);
  }
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

DeviceRank::DeviceRank(int rank, std::unique_ptr<Device> device, size_t eager_bytes)
    : rank_(rank),
      device_(std::move(device)),
      words_memory_(device_->AllocatePinned(sizeof(Words))),
      words_(new (words_memory_.get()) Words{}),
      device_words_(static_cast<std::byte*>(device_->DeviceAddress(words_))),
      eager_bytes_(eager_bytes),
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
  exchange.program = request.stream;
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
  if (program_ == nullptr) program_ = request.stream;
  const bool is_eager = request.operand.size() <= eager_bytes_ && request.stream == program_;
  std::vector<InFlight> overdue;
  if (exchange.source >= 0) overdue = PlanReceive(exchange, is_eager);
  if (exchange.target >= 0) PlanSend(exchange, is_eager);
  ++started_;
  {
    const std::lock_guard lock(mutex_);
    in_flight_.push_back(exchange);
  }
  if (exchange.source < 0) {
    device_->Fill(request.stream, request.result.data(), std::byte{0}, request.result.size());
  }
  if (!IsByProgram(exchange.sends)) {
    device_->WriteValue(request.stream, AddressOf(words_->reached), exchange.number);
  }
  const bool receives = exchange.source >= 0 && !exchange.is_pending;
  const bool sends = exchange.target >= 0 && !IsByProgram(exchange.sends);
  if (receives || sends || !overdue.empty()) device_->Record(ready_.get(), request.stream);
  for (const InFlight& other : overdue) Receive(other);
  if (receives) Receive(exchange);
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
    std::this_thread::sleep_for(kPause);
  }
}

uint64_t DeviceRank::NumChunks(const RankRing& ring, size_t num_bytes) {
  const size_t chunk_bytes = ChunkBytes(num_bytes, ring.end->slot_bytes());
  return std::max<uint64_t>(1, (num_bytes + chunk_bytes - 1) / chunk_bytes);
}

// Chunks take turns on our streams.
DeviceRank::Marks DeviceRank::NextMarks(Marks& last, uint64_t first_chunk, uint64_t num_chunks) {
  Marks marks{};
  for (uint64_t i = 0; i < std::min<uint64_t>(num_chunks, kStreams); ++i) {
    const size_t s = (first_chunk + i) % kStreams;
    marks.at(s) = Next(last.at(s));
  }
  return marks;
}

void DeviceRank::PlanSend(InFlight& exchange, bool is_eager) {
  const RankRing& ring = *outgoing_.at(exchange.target);
  const uint64_t num_chunks = NumChunks(ring, exchange.operand_bytes);
  Marks ours = last_sends_;
  ours.at(kProgram) = 0;
  const bool overtakes = !IsOver(ours, words_->sent);  // what our streams have to send
  if (is_eager && IsShort(ring, num_chunks) && !overtakes && IsEmptied(ring, ring.chunks)) {
    exchange.sends.at(kProgram) = Next(last_sends_.at(kProgram));
  } else {
    exchange.sends = NextMarks(last_sends_, ring.chunks, num_chunks);
  }
}

// Gives what is to be received before, as the exchange needs its slots: in the order of marks.
std::vector<DeviceRank::InFlight> DeviceRank::PlanReceive(InFlight& exchange, bool is_eager) {
  RankRing& ring = *incoming_.at(exchange.source);
  const uint64_t num_chunks = NumChunks(ring, exchange.result.size());
  exchange.first_chunk = ring.chunks.fetch_add(num_chunks);
  std::vector<InFlight> overdue;
  {
    const std::lock_guard lock(mutex_);
    for (InFlight& other : in_flight_) {
      if (!other.is_pending || other.source != exchange.source) continue;
      if (other.first_chunk + kRingSlots >= exchange.first_chunk + num_chunks) continue;
      other.is_pending = false;
      other.receives = NextMarks(last_receives_, other.first_chunk, 1);
      overdue.push_back(other);
    }
  }
  exchange.is_pending = is_eager && IsShort(ring, num_chunks);
  if (!exchange.is_pending) {
    exchange.receives = NextMarks(last_receives_, exchange.first_chunk, num_chunks);
  }
  return overdue;
}

bool DeviceRank::IsShort(const RankRing& ring, uint64_t num_chunks) {
  return num_chunks == 1 && ring.end->is_shared();
}

bool DeviceRank::IsEmptied(const RankRing& ring, uint64_t chunk) {
  return ring.end->words().emptied.at(RingSlot(chunk)).host().load() + 1 >= RingTurn(chunk);
}

void DeviceRank::Send(const InFlight& exchange, std::span<const std::byte> operand) {
  RankRing& ring = *outgoing_.at(exchange.target);
  const RingEnd& end = *ring.end;
  const size_t chunk_bytes = ChunkBytes(operand.size(), end.slot_bytes());
  const bool by_program = IsByProgram(exchange.sends);
  const auto stream_of = [&](uint64_t s) {
    return by_program ? exchange.program : send_streams_.at(s % kStreams).get();
  };
  ring.num_bytes += operand.size();
  if (!by_program) {
    ForEachStream(exchange.sends,
                  [&](size_t s) { device_->WaitEvent(stream_of(s), ready_.get()); });
  }
  do {
    const auto chunk = operand.first(std::min(chunk_bytes, operand.size()));
    operand = operand.subspan(chunk.size());
    auto* const stream = stream_of(ring.chunks);
    const uint32_t slot = RingSlot(ring.chunks);
    const uint32_t turn = RingTurn(ring.chunks);
    if (!IsEmptied(ring, ring.chunks)) device_->WaitValue(stream, end.emptied(slot), turn - 1);
    ++ring.chunks;
    device_->Copy(stream, end.slot(slot), chunk.data(), chunk.size());
    device_->WriteValue(stream, end.filled(slot), turn);
  } while (!operand.empty());
  ForEachStream(exchange.sends, [&](size_t s) {
    device_->WriteValue(stream_of(s), AddressOf(words_->sent.at(s)), exchange.sends.at(s));
  });
}

void DeviceRank::Receive(const InFlight& exchange) {
  RankRing& ring = *incoming_.at(exchange.source);
  const RingEnd& end = *ring.end;
  std::span<std::byte> result = exchange.result;
  const size_t chunk_bytes = ChunkBytes(result.size(), end.slot_bytes());
  const bool by_program = IsByProgram(exchange.receives);
  const auto stream_of = [&](uint64_t s) {
    return by_program ? exchange.program : receive_streams_.at(s % kStreams).get();
  };
  ring.num_bytes += result.size();
  if (!by_program) {
    ForEachStream(exchange.receives,
                  [&](size_t s) { device_->WaitEvent(stream_of(s), ready_.get()); });
  }
  uint64_t number = exchange.first_chunk;
  do {
    const auto chunk = result.first(std::min(chunk_bytes, result.size()));
    result = result.subspan(chunk.size());
    auto* const stream = stream_of(number);
    const uint32_t slot = RingSlot(number);
    const uint32_t turn = RingTurn(number++);
    device_->WaitValue(stream, end.filled(slot), turn);
    device_->Copy(stream, chunk.data(), end.slot(slot), chunk.size());
    device_->WriteValue(stream, end.emptied(slot), turn);
  } while (!result.empty());
  ForEachStream(exchange.receives, [&](size_t s) {
    device_->WaitValue(stream_of(s), end.gate(), kOpen);
    device_->WriteValue(stream_of(s), AddressOf(words_->received.at(s)), exchange.receives.at(s));
  });
}

void DeviceRank::Done(StreamHandle stream, int64_t plan, int64_t index) {
  InFlight exchange{};
  bool receives = false;
  {
    const std::lock_guard lock(mutex_);
    const auto found = std::ranges::find_if(in_flight_, [&](const InFlight& candidate) {
      return candidate.plan == plan && candidate.index == index && candidate.done_number == 0;
    });
    if (found == in_flight_.end()) {
      Throw(ErrorCode::kUsage, "exchange ", index, " of plan ", plan, " is done before its start");
    }
    found->done_number = Next(dones_);
    receives = std::exchange(found->is_pending, false);
    if (receives && stream == found->program) {
      found->receives.at(kProgram) = Next(last_receives_.at(kProgram));
    } else if (receives) {
      found->receives = NextMarks(last_receives_, found->first_chunk, 1);
    }
    exchange = *found;
  }
  if (receives && stream != exchange.program) device_->Record(ready_.get(), stream);
  if (receives) Receive(exchange);
  const auto wait = [&](const Marks& marks, MarkWords& words) {
    ForEachStream(marks, [&](size_t s) {
      if (s == kProgram && stream == exchange.program) return;  // in its order
      device_->WaitValue(stream, AddressOf(words.at(s)), marks.at(s));
    });
  };
  wait(exchange.receives, words_->received);
  wait(exchange.sends, words_->sent);
  device_->WaitValue(stream, AddressOf(words_->go_on), exchange.done_number);
}

}  // namespace jaxhet
