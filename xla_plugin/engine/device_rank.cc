#include "xla_plugin/engine/device_rank.h"

#include <algorithm>
#include <deque>
#include <iterator>
#include <new>
#include <thread>

#include "xla_plugin/base/error.h"

namespace jaxhet {
namespace {

// How long Done() waits for sources' launches: at most so long, and in vain for this part of all
// time. That is enough to bring processes together that launch at the same pace.
constexpr std::chrono::milliseconds kMaxLaunchWait{10};
constexpr int kLaunchWaitFraction = 8;

uint32_t Next(uint32_t& last, uint32_t count = 1) {
  return last = DeviceNumber(uint64_t{last} + count);
}

// Keeps objects that a device may still use. They are never freed: that would wait for the device.
template <typename T>
void LeakOnPurpose(T&& remains) {
  static auto* const leaked = new std::deque<std::remove_cvref_t<T>>;
  static auto* const mutex = new std::mutex;
  const std::lock_guard lock(*mutex);
  leaked->push_back(std::forward<T>(remains));
}

}  // namespace

DeviceRank::DeviceRank(int rank, std::unique_ptr<Device> device, size_t eager_bytes)
    : rank_(rank),
      device_(std::move(device)),
      words_memory_(device_->AllocatePinned(sizeof(Words))),
      words_(new (words_memory_.get()) Words{}),
      device_words_(static_cast<std::byte*>(device_->DeviceAddress(words_))),
      eager_bytes_(eager_bytes),
      rescue_stream_(device_->CreateStream(StreamPriority::kHigh)) {
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
  LeakOnPurpose(std::move(words_memory_));  // which the program's stream may still look at
  if (is_idle) return;
  LeakOnPurpose(std::move(outgoing_));
  LeakOnPurpose(std::move(incoming_));
}

void DeviceRank::AddOutgoing(int target, std::unique_ptr<RankRing> ring) {
  outgoing_[target] = std::move(ring);
}

void DeviceRank::AddIncoming(int source, std::unique_ptr<RankRing> ring) {
  incoming_[source] = std::move(ring);
}

std::vector<int> DeviceRank::SocketFds() const {
  std::vector<int> fds;
  for (const Rings* const rings : {&outgoing_, &incoming_}) {
    for (const auto& [peer, ring] : *rings) {
      std::ranges::copy(ring->end->SocketFds(), std::back_inserter(fds));
    }
  }
  return fds;
}

void* DeviceRank::AddressOf(const DeviceWord& word) const {
  return device_words_ +
         (reinterpret_cast<const std::byte*>(&word) - reinterpret_cast<const std::byte*>(words_));
}

std::optional<DeviceRank::Mismatch> DeviceRank::Start(const DeviceRequest& request) {
  if (program_ == nullptr) program_ = request.stream;
  ++started_;
  const uint32_t first = last_leg_ + 1;
  uint64_t incoming_number = 0;
  for (InFlight& leg : LegsOf(request)) {
    leg.number = Next(last_leg_);
    leg.first = first;
    if (leg.is_own) {
      leg.incoming_number = incoming_number + 1;  // leaves the other stream to a pull
      StartOwn(leg);
    } else if (auto mismatch = StartLeg(leg)) {
      return mismatch;
    }
    incoming_number = leg.incoming_number;
  }
  return std::nullopt;
}

std::vector<DeviceRank::InFlight> DeviceRank::LegsOf(const DeviceRequest& request) const {
  InFlight whole{};
  whole.kind = request.kind;
  whole.program = request.stream;
  whole.plan = request.plan;
  whole.index = request.index;
  whole.deadline_ms = request.deadline_ms;
  whole.operand_bytes = request.operand.size();
  whole.operand = request.operand;
  whole.result = request.result;
  whole.poison = request.poison;
  switch (request.kind) {
    case ExchangeKind::kPermute:
      return {PermuteLeg(request, whole)};
    case ExchangeKind::kAllGather:
    case ExchangeKind::kAllToAll:
      return GroupLegs(request, whole);
  }
  Throw(ErrorCode::kUsage, "no exchange has the kind ", static_cast<int64_t>(request.kind));
}

DeviceRank::InFlight DeviceRank::PermuteLeg(const DeviceRequest& request, InFlight leg) const {
  for (size_t i = 0; i + 1 < request.ranks.size(); i += 2) {
    if (request.ranks[i] == rank_) leg.target = static_cast<int>(request.ranks[i + 1]);
    if (request.ranks[i + 1] == rank_) leg.source = static_cast<int>(request.ranks[i]);
  }
  leg.is_last = true;
  leg.part_bytes = static_cast<size_t>(request.part_bytes);
  if (leg.part_bytes > 0 && leg.part_bytes < leg.operand_bytes) {
    leg.parts = static_cast<uint32_t>((leg.operand_bytes + leg.part_bytes - 1) / leg.part_bytes);
  }
  return leg;
}

std::vector<DeviceRank::InFlight> DeviceRank::GroupLegs(const DeviceRequest& request,
                                                        const InFlight& whole) const {
  const std::vector<int> group = GroupOf(request.ranks, request.group_size, rank_);
  const size_t members = group.size();
  const bool is_gather = request.kind == ExchangeKind::kAllGather;
  const size_t block = request.operand.size() / (is_gather ? 1 : members);
  const size_t blocks = is_gather ? static_cast<size_t>(request.group_size) : members;
  if (request.result.size() != block * blocks) {
    Throw(ErrorCode::kUsage, "an exchange of ", members, " devices can't turn ",
          request.operand.size(), " bytes into ", request.result.size());
  }
  const auto own = static_cast<size_t>(std::ranges::find(group, rank_) - group.begin());
  std::vector<InFlight> legs(request.skips_own && members > 1 ? members - 1 : members, whole);
  for (size_t i = 0; i < legs.size(); ++i) {
    InFlight& leg = legs[i];
    const size_t to = (own + i + 1) % members;
    const size_t from = (own + members - i - 1) % members;
    leg.is_own = to == own;
    leg.target = leg.is_own ? -1 : group[to];
    leg.source = leg.is_own ? -1 : group[from];
    if (!is_gather) leg.operand = request.operand.subspan(to * block, block);
    leg.result = request.result.subspan(from * block, block);
  }
  legs.back().is_last = true;
  return legs;
}

void DeviceRank::Add(const InFlight& exchange) {
  const std::lock_guard lock(mutex_);
  in_flight_.push_back(exchange);
}

void DeviceRank::StartOwn(InFlight& exchange) {
  exchange.is_pending = exchange.operand.size() > eager_bytes_;
  Add(exchange);
  if (!exchange.is_pending) {
    device_->Copy(exchange.program, exchange.result.data(), exchange.operand.data(),
                  exchange.result.size());
    return;
  }
  Event ready = TakeEvent();
  device_->Record(ready.get(), exchange.program);
  ReceiveByStreams(exchange, ready.get());
  events_.push_back(std::move(ready));
}

std::optional<DeviceRank::Mismatch> DeviceRank::StartLeg(InFlight& exchange) {
  if (auto mismatch = Agree(exchange)) return mismatch;
  const bool is_eager = exchange.operand.size() <= eager_bytes_ && exchange.program == program_;
  std::vector<InFlight> overdue;
  if (exchange.source >= 0) {
    exchange.is_pending = true;
    if (receipts_.empty() && WayOf(exchange) == RingWays::Way::kInSlots) {
      overdue = NumberChunks(exchange);
      exchange.is_eager =
          is_eager && IsShort(*incoming_.at(exchange.source), exchange.result.size());
    }
  }
  if (exchange.target >= 0 && !exchange.is_pulled) PlanSend(exchange, is_eager);
  Add(exchange);
  if (exchange.source < 0) {
    device_->Fill(exchange.program, exchange.result.data(), std::byte{0}, exchange.result.size());
  }
  StreamWork program(*device_, exchange.program);
  if (exchange.is_pulled) {
    RankRing& ring = *outgoing_.at(exchange.target);
    ring.num_bytes += exchange.operand.size();
    in_place_bytes_ += exchange.operand.size();
    // Whoever carries it has it go through the peer's slots.
    if (!ring.end->is_shared()) ring.chunks += NumChunks(ring, exchange.operand.size());
    program.Write(ring.end->ready(), DeviceNumber(exchange.outgoing_number));
  }
  if (!IsByProgram(exchange.sends) && last_reached_ != exchange.first) {
    last_reached_ = exchange.first;
    program.Write(AddressOf(words_->reached), exchange.first);
  }
  const bool receives = exchange.source >= 0 && !exchange.is_eager;
  Event ready;
  if (receives || IsByStreams(exchange.sends) || !overdue.empty()) {
    ready = TakeEvent();
    device_->Record(ready.get(), exchange.program);
  }
  for (const InFlight& other : overdue) ReceiveByStreams(other, ready.get());
  if (exchange.target >= 0 && !exchange.is_pulled) Send(exchange, &program, ready.get());
  program.Flush();
  if (receives) {
    ReceiveWhenKnown({exchange, std::move(ready)});
  } else if (ready.get() != nullptr) {
    events_.push_back(std::move(ready));
  }
  return std::nullopt;
}

// Numbers the exchange on its rings, and compares it with what the peers have launched there.
std::optional<DeviceRank::Mismatch> DeviceRank::Agree(InFlight& exchange) {
  const Launch launch{
      .plan = exchange.plan, .index = exchange.index, .num_bytes = exchange.operand.size()};
  std::optional<Mismatch> mismatch;
  const auto compare = [&](int peer_rank, LaunchLog& own, const LaunchLog& peer, uint64_t number,
                           uint64_t place) {
    own.Publish(number, launch, place);
    const auto theirs = peer.Find(number);
    if (theirs && *theirs != launch) mismatch = {peer_rank, launch, *theirs};
  };
  if (exchange.target >= 0) {
    RankRing& ring = RingOf(outgoing_, exchange.target);
    exchange.outgoing_number = ++ring.exchanges;
    const bool may_be_pulled = launch.num_bytes >= ring.end->pull_bytes();
    const auto place = may_be_pulled && exchange.program == program_
                           ? ring.end->PlaceOf(exchange.operand)
                           : std::nullopt;
    RingWords& words = ring.end->words();
    WaitForRoom(exchange.outgoing_number,
                [&] { return ring.end->Passed().value_or(words.target.last()); });
    compare(exchange.target, words.source, words.target, exchange.outgoing_number,
            place.value_or(0));
    if (may_be_pulled) {
      const auto way = place ? RingWays::Way::kPulled : RingWays::Way::kInSlots;
      exchange.is_pulled =
          words.ways.Choose(exchange.outgoing_number, way) == RingWays::Way::kPulled;
    }
  }
  if (exchange.source >= 0) {
    RankRing& ring = RingOf(incoming_, exchange.source);
    exchange.incoming_number = ++ring.exchanges;
    RingWords& words = ring.end->words();
    WaitForRoom(exchange.incoming_number, [&] { return words.source.last(); });
    compare(exchange.source, words.target, words.source, exchange.incoming_number, 0);
  }
  return mismatch;
}

RankRing& DeviceRank::RingOf(Rings& rings, int peer_rank) {
  const auto found = rings.find(peer_rank);
  if (found != rings.end()) return *found->second;
  Throw(ErrorCode::kUsage, "rank ", rank_, " has no ring to or from rank ", peer_rank);
}

// The launch log of a ring is finite. Streams fill up long before it does.
template <typename Passed>
void DeviceRank::WaitForRoom(uint64_t number, Passed passed) const {
  while (number > LaunchLog::kEntries && passed() < number - LaunchLog::kEntries && !stopped_) {
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
  Marks ours = last_sends_;
  ours.at(kProgram) = 0;
  const bool overtakes = !IsOver(ours, words_->sent);  // our streams still have to send
  const bool is_short = IsShort(ring, exchange.operand.size());
  if (is_eager && is_short && !overtakes && IsEmptied(ring, ring.chunks)) {
    exchange.sends.at(kProgram) = Next(last_sends_.at(kProgram));
  } else {
    exchange.sends = NextMarks(last_sends_, ring.chunks, NumChunks(ring, exchange.operand.size()));
  }
}

// Gives what is to be received before, as the exchange needs its slots.
std::vector<DeviceRank::InFlight> DeviceRank::NumberChunks(InFlight& exchange) {
  RankRing& ring = *incoming_.at(exchange.source);
  const uint64_t num_chunks = NumChunks(ring, exchange.result.size());
  const uint64_t first = ring.chunks.fetch_add(num_chunks);
  exchange.first_chunk = first;
  std::vector<InFlight> overdue;
  const std::lock_guard lock(mutex_);
  for (InFlight& other : in_flight_) {
    if (!other.is_eager || other.source != exchange.source) continue;
    if (other.first_chunk.value_or(0) + kRingSlots >= first + num_chunks) continue;
    other.is_eager = false;
    overdue.push_back(other);
  }
  return overdue;
}

bool DeviceRank::IsShort(const RankRing& ring, size_t num_bytes) {
  return NumChunks(ring, num_bytes) == 1 && ring.end->is_shared();
}

bool DeviceRank::IsByStreams(Marks marks) {
  marks.at(kProgram) = 0;
  return marks != Marks{};
}

bool DeviceRank::IsEmptied(const RankRing& ring, uint64_t chunk) {
  return ring.end->words().emptied.at(RingSlot(chunk)).host().load() + 1 >= RingTurn(chunk);
}

Event DeviceRank::TakeEvent() {
  if (events_.empty()) return device_->CreateEvent();
  Event event = std::move(events_.back());
  events_.pop_back();
  return event;
}

void DeviceRank::ReceiveWhenKnown(Receipt receipt) {
  receipts_.push_back(std::move(receipt));
  ReceiveKnown();
}

void DeviceRank::ReceiveKnown() {
  while (!receipts_.empty() && WayOf(receipts_.front().exchange)) {
    Receipt receipt = std::move(receipts_.front());
    receipts_.pop_front();
    InFlight& exchange = receipt.exchange;
    if (WayOf(exchange) == RingWays::Way::kInSlots && !exchange.first_chunk) {
      for (const InFlight& overdue : NumberChunks(exchange)) {
        ReceiveByStreams(overdue, receipt.ready.get());
      }
    }
    ReceiveByStreams(exchange, receipt.ready.get());
    events_.push_back(std::move(receipt.ready));
  }
}

void DeviceRank::ReceiveByStreams(InFlight exchange, EventHandle ready) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = std::ranges::find(in_flight_, exchange.number, &InFlight::number);
    if (found == in_flight_.end()) return;  // it has been abandoned
    found->is_pending = false;
    found->first_chunk = exchange.first_chunk;
    if (exchange.first_chunk) {
      const uint64_t num_chunks = NumChunks(*incoming_.at(exchange.source), exchange.result.size());
      found->receives = NextMarks(last_receives_, *exchange.first_chunk, num_chunks);
    } else {
      const size_t s = exchange.incoming_number % kStreams;
      found->receives.at(s) = Next(last_receives_.at(s), found->parts);
    }
    exchange = *found;
  }
  if (exchange.is_own) {
    CopyOwn(exchange, ready);
  } else if (exchange.first_chunk) {
    Receive(exchange, *exchange.first_chunk, nullptr, ready);
  } else {
    Pull(exchange, ready);
  }
}

// None while it has not been chosen.
std::optional<RingWays::Way> DeviceRank::WayOf(const InFlight& exchange) const {
  const RingEnd& end = *incoming_.at(exchange.source)->end;
  if (exchange.result.size() < end.pull_bytes()) return RingWays::Way::kInSlots;
  return end.words().ways.Find(exchange.incoming_number);
}

// Exchanges that their sources have not launched by the end of the wait budget arrive through
// slots.
void DeviceRank::ReceiveAllUntil(uint32_t number) {
  const auto are_left = [&] {
    return !receipts_.empty() && receipts_.front().exchange.number <= number;
  };
  ReceiveKnown();
  if (!are_left()) return;
  const Time begin = Clock::now();
  const Clock::duration wait_budget =
      std::min<Clock::duration>(kMaxLaunchWait, (begin - gave_up_at_) / kLaunchWaitFraction);
  bool gave_up = false;
  while (are_left()) {
    gave_up |= stopped_ || Clock::now() - begin >= wait_budget;
    if (gave_up) {
      const InFlight& exchange = receipts_.front().exchange;
      RingWords& words = incoming_.at(exchange.source)->end->words();
      words.ways.Choose(exchange.incoming_number, RingWays::Way::kInSlots);
    } else {
      std::this_thread::yield();
    }
    ReceiveKnown();
  }
  if (gave_up) gave_up_at_ = Clock::now();
}

void DeviceRank::Done(StreamHandle stream, int64_t plan, int64_t index) {
  uint32_t first = 0;
  uint32_t last = 0;
  {
    const std::lock_guard lock(mutex_);
    const auto found = std::ranges::find_if(in_flight_, [&](const InFlight& candidate) {
      return candidate.plan == plan && candidate.index == index && !candidate.is_done();
    });
    if (found == in_flight_.end()) {
      Throw(ErrorCode::kUsage, "exchange ", index, " of plan ", plan, " is done before its start");
    }
    first = found->number;
    last = std::ranges::find_if(found, in_flight_.end(), &InFlight::is_last)->number;
  }
  StreamWork program(*device_, stream);
  for (uint32_t number = first; number <= last; ++number) DoneLeg(number, program);
  program.Flush();
}

void DeviceRank::DoneLeg(uint32_t number, StreamWork& program) {
  const auto find = [&]() -> InFlight& {
    const auto found = std::ranges::find(in_flight_, number, &InFlight::number);
    if (found == in_flight_.end()) Throw(ErrorCode::kPeer, "the job failed before its done");
    return *found;
  };
  InFlight exchange{};
  {
    const std::lock_guard lock(mutex_);
    exchange = find();
  }
  auto* const stream = program.stream();
  const bool by_program = exchange.is_eager && stream == exchange.program;
  if (exchange.is_eager && !by_program) {
    Event ready = TakeEvent();
    device_->Record(ready.get(), stream);
    ReceiveWhenKnown({exchange, std::move(ready)});
  }
  ReceiveAllUntil(number);
  {
    const std::lock_guard lock(mutex_);
    InFlight& found = find();
    if (found.done_parts++ == 0) found.done_number = Next(dones_);
    found.is_eager = false;
    if (by_program) {
      found.is_pending = false;
      found.receives.at(kProgram) = Next(last_receives_.at(kProgram));
    }
    if (found.is_pulled && found.is_done()) {
      const size_t s = stream == program_ ? kProgram : found.outgoing_number % kStreams;
      found.sends.at(s) = Next(last_sends_.at(s));
    }
    exchange = found;
  }
  if (by_program && exchange.first_chunk) {
    Receive(exchange, *exchange.first_chunk, &program, nullptr);
  }
  const auto wait = [&](const Marks& marks, MarkWords& words) {
    ForEachStream(marks, [&](size_t s) {
      if (s == kProgram && stream == program_) return;  // in its order
      program.Wait(AddressOf(words.at(s)), marks.at(s));
    });
  };
  const bool is_taken = exchange.is_pulled && exchange.is_done();
  if (is_taken) AwaitTaken(exchange, program);
  Marks receives = exchange.receives;
  if (!exchange.first_chunk && exchange.source >= 0) {  // receives of the parts so far
    receives.at(exchange.incoming_number % kStreams) -= exchange.parts - exchange.done_parts;
  }
  wait(receives, words_->received);
  wait(exchange.sends, words_->sent);
  program.Wait(AddressOf(words_->go_on), exchange.done_number);
  if (is_taken && IsByProgram(exchange.sends)) {  // all waits are one call with it
    program.Write(AddressOf(words_->sent.at(kProgram)), exchange.sends.at(kProgram));
  }
}

}  // namespace jaxhet
