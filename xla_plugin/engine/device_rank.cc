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

void DeviceRank::AddOutgoing(int target, std::unique_ptr<RankChannel> channel) {
  outgoing_[target] = std::move(channel);
}

void DeviceRank::AddIncoming(int source, std::unique_ptr<RankChannel> channel) {
  incoming_[source] = std::move(channel);
}

std::vector<int> DeviceRank::SocketFds() const {
  std::vector<int> fds;
  for (const Channels* const channels : {&outgoing_, &incoming_}) {
    for (const auto& [peer, channel] : *channels) {
      std::ranges::copy(channel->end->SocketFds(), std::back_inserter(fds));
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
  const uint32_t first = last_transfer_ + 1;
  uint64_t incoming_number = 0;
  for (InFlight& transfer : TransfersOf(request)) {
    transfer.number = Next(last_transfer_);
    transfer.first = first;
    if (transfer.is_own) {
      transfer.incoming_number = incoming_number + 1;  // leaves the other stream to a pull
      StartOwn(transfer);
    } else if (auto mismatch = StartTransfer(transfer)) {
      return mismatch;
    }
    incoming_number = transfer.incoming_number;
  }
  return std::nullopt;
}

std::vector<DeviceRank::InFlight> DeviceRank::TransfersOf(const DeviceRequest& request) const {
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
      return {PermuteTransfer(request, whole)};
    case ExchangeKind::kAllGather:
    case ExchangeKind::kAllToAll:
      return GroupTransfers(request, whole);
  }
  Throw(ErrorCode::kUsage, "no exchange has the kind ", static_cast<int64_t>(request.kind));
}

DeviceRank::InFlight DeviceRank::PermuteTransfer(const DeviceRequest& request,
                                                 InFlight transfer) const {
  for (size_t i = 0; i + 1 < request.ranks.size(); i += 2) {
    if (request.ranks[i] == rank_) transfer.target = static_cast<int>(request.ranks[i + 1]);
    if (request.ranks[i + 1] == rank_) transfer.source = static_cast<int>(request.ranks[i]);
  }
  transfer.is_last = true;
  transfer.part_bytes = static_cast<size_t>(request.part_bytes);
  if (transfer.part_bytes > 0 && transfer.part_bytes < transfer.operand_bytes) {
    transfer.parts = static_cast<uint32_t>((transfer.operand_bytes + transfer.part_bytes - 1) /
                                           transfer.part_bytes);
  }
  return transfer;
}

std::vector<DeviceRank::InFlight> DeviceRank::GroupTransfers(const DeviceRequest& request,
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
  std::vector<InFlight> transfers(request.skips_own && members > 1 ? members - 1 : members, whole);
  for (size_t i = 0; i < transfers.size(); ++i) {
    InFlight& transfer = transfers[i];
    const size_t to = (own + i + 1) % members;
    const size_t from = (own + members - i - 1) % members;
    transfer.is_own = to == own;
    transfer.target = transfer.is_own ? -1 : group[to];
    transfer.source = transfer.is_own ? -1 : group[from];
    if (!is_gather) transfer.operand = request.operand.subspan(to * block, block);
    transfer.result = request.result.subspan(from * block, block);
  }
  transfers.back().is_last = true;
  return transfers;
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

std::optional<DeviceRank::Mismatch> DeviceRank::StartTransfer(InFlight& exchange) {
  if (auto mismatch = Agree(exchange)) return mismatch;
  const bool is_eager = exchange.operand.size() <= eager_bytes_ && exchange.program == program_;
  std::vector<InFlight> overdue;
  if (exchange.source >= 0) {
    exchange.is_pending = true;
    if (receipts_.empty() && RouteOf(exchange) == RouteChoices::Route::kSlots) {
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
    RankChannel& channel = *outgoing_.at(exchange.target);
    channel.num_bytes += exchange.operand.size();
    in_place_bytes_ += exchange.operand.size();
    // Whoever carries it has it go through the peer's slots.
    if (!channel.end->is_shared()) channel.chunks += NumChunks(channel, exchange.operand.size());
    program.Write(channel.end->ready(), DeviceNumber(exchange.outgoing_number));
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

// Numbers the exchange on its channels, and compares it with what the peers have launched there.
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
    RankChannel& channel = ChannelOf(outgoing_, exchange.target);
    exchange.outgoing_number = ++channel.exchanges;
    const bool may_be_pulled = launch.num_bytes >= channel.end->pull_bytes();
    const auto place = may_be_pulled && exchange.program == program_
                           ? channel.end->PlaceOf(exchange.operand)
                           : std::nullopt;
    ChannelWords& words = channel.end->words();
    WaitForRoom(exchange.outgoing_number,
                [&] { return channel.end->Passed().value_or(words.target.last()); });
    compare(exchange.target, words.source, words.target, exchange.outgoing_number,
            place.value_or(0));
    if (may_be_pulled) {
      const auto route = place ? RouteChoices::Route::kZeroCopy : RouteChoices::Route::kSlots;
      exchange.is_pulled =
          words.routes.Choose(exchange.outgoing_number, route) == RouteChoices::Route::kZeroCopy;
    }
  }
  if (exchange.source >= 0) {
    RankChannel& channel = ChannelOf(incoming_, exchange.source);
    exchange.incoming_number = ++channel.exchanges;
    ChannelWords& words = channel.end->words();
    WaitForRoom(exchange.incoming_number, [&] { return words.source.last(); });
    compare(exchange.source, words.target, words.source, exchange.incoming_number, 0);
  }
  return mismatch;
}

RankChannel& DeviceRank::ChannelOf(Channels& channels, int peer_rank) {
  const auto found = channels.find(peer_rank);
  if (found != channels.end()) return *found->second;
  Throw(ErrorCode::kUsage, "rank ", rank_, " has no device channel to or from rank ", peer_rank);
}

// The launch log of a channel is finite. Streams fill up long before it does.
template <typename Passed>
void DeviceRank::WaitForRoom(uint64_t number, Passed passed) const {
  while (number > LaunchLog::kEntries && passed() < number - LaunchLog::kEntries && !stopped_) {
    std::this_thread::sleep_for(kPause);
  }
}

uint64_t DeviceRank::NumChunks(const RankChannel& channel, size_t num_bytes) {
  const size_t chunk_bytes = ChunkBytes(num_bytes, channel.end->slot_bytes());
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
  const RankChannel& channel = *outgoing_.at(exchange.target);
  Marks ours = last_sends_;
  ours.at(kProgram) = 0;
  const bool overtakes = !IsOver(ours, words_->sent);  // our streams still have to send
  const bool is_short = IsShort(channel, exchange.operand.size());
  if (is_eager && is_short && !overtakes && IsFree(channel, channel.chunks)) {
    exchange.sends.at(kProgram) = Next(last_sends_.at(kProgram));
  } else {
    exchange.sends =
        NextMarks(last_sends_, channel.chunks, NumChunks(channel, exchange.operand.size()));
  }
}

// Gives what is to be received before, as the exchange needs its slots.
std::vector<DeviceRank::InFlight> DeviceRank::NumberChunks(InFlight& exchange) {
  RankChannel& channel = *incoming_.at(exchange.source);
  const uint64_t num_chunks = NumChunks(channel, exchange.result.size());
  const uint64_t first = channel.chunks.fetch_add(num_chunks);
  exchange.first_chunk = first;
  std::vector<InFlight> overdue;
  const std::lock_guard lock(mutex_);
  for (InFlight& other : in_flight_) {
    if (!other.is_eager || other.source != exchange.source) continue;
    if (other.first_chunk.value_or(0) + kChannelSlots >= first + num_chunks) continue;
    other.is_eager = false;
    overdue.push_back(other);
  }
  return overdue;
}

bool DeviceRank::IsShort(const RankChannel& channel, size_t num_bytes) {
  return NumChunks(channel, num_bytes) == 1 && channel.end->is_shared();
}

bool DeviceRank::IsByStreams(Marks marks) {
  marks.at(kProgram) = 0;
  return marks != Marks{};
}

bool DeviceRank::IsFree(const RankChannel& channel, uint64_t chunk) {
  return channel.end->words().head.at(SlotOf(chunk)).host().load() + 1 >= GenerationOf(chunk);
}

Event DeviceRank::TakeEvent() {
  if (events_.empty()) return device_->CreateEvent();
  Event event = std::move(events_.back());
  events_.pop_back();
  return event;
}

// Receipts whose chunks are numbered are first: they use their slots before all others.
void DeviceRank::ReceiveWhenKnown(Receipt receipt) {
  if (receipt.exchange.first_chunk) {
    receipts_.push_front(std::move(receipt));
  } else {
    receipts_.push_back(std::move(receipt));
  }
  ReceiveKnown();
}

void DeviceRank::ReceiveKnown() {
  while (!receipts_.empty() && RouteOf(receipts_.front().exchange)) {
    Receipt receipt = std::move(receipts_.front());
    receipts_.pop_front();
    InFlight& exchange = receipt.exchange;
    if (RouteOf(exchange) == RouteChoices::Route::kSlots && !exchange.first_chunk) {
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
    found->is_eager = false;
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
std::optional<RouteChoices::Route> DeviceRank::RouteOf(const InFlight& exchange) const {
  const DeviceChannel& end = *incoming_.at(exchange.source)->end;
  if (exchange.result.size() < end.pull_bytes()) return RouteChoices::Route::kSlots;
  return end.words().routes.Find(exchange.incoming_number);
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
      ChannelWords& words = incoming_.at(exchange.source)->end->words();
      words.routes.Choose(exchange.incoming_number, RouteChoices::Route::kSlots);
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
  bool by_program = exchange.is_eager && stream == exchange.program;
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
    by_program &= found.is_eager;  // a receipt may have needed its slot meanwhile
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
