#include "xla_plugin/engine/device_rank.h"

#include <algorithm>
#include <thread>
#include <type_traits>
#include <utility>

#include "xla_plugin/base/error.h"

namespace jaxhet {
namespace {

constexpr std::chrono::microseconds kLogPause{50};  // between looks at a peer's launches
// How long Done() waits for sources' launches: at most so long, and in vain for this part of all
// time. That is enough to bring processes together that launch at the same pace.
constexpr std::chrono::milliseconds kMaxLaunchWait{10};
constexpr int kLaunchWaitFraction = 8;

// Keeps objects that a device may still use. They are never freed: that would wait for the device.
template <typename T>
void LeakOnPurpose(T&& remains) {
  static auto* const leaked = new std::deque<std::remove_cvref_t<T>>;
  static auto* const mutex = new std::mutex;
  const std::lock_guard lock(*mutex);
  leaked->push_back(std::forward<T>(remains));
}

Launch LaunchOf(const InFlight& transfer) {
  return {.plan = transfer.exchange.plan,
          .index = transfer.exchange.index,
          .num_bytes = transfer.transfer.operand.size()};
}

// Each end writes its launch, and then reads the other's.
std::optional<LaunchMismatch> Compare(int peer_rank, const InFlight& transfer, uint64_t number,
                                      LaunchLog& own, const LaunchLog& peer, uint64_t place) {
  const Launch launch = LaunchOf(transfer);
  own.Publish(number, launch, place);
  const auto theirs = peer.Find(number);
  if (!theirs || *theirs == launch) return std::nullopt;
  return LaunchMismatch{peer_rank, launch, *theirs};
}

}  // namespace

DeviceRank::DeviceRank(int rank, std::unique_ptr<Device> device, size_t eager_bytes)
    : rank_(rank),
      device_(std::move(device)),
      words_(*device_),
      channels_(rank),
      eager_bytes_(eager_bytes),
      sent_(words_, words_->sent),
      received_(words_, words_->received),
      view_(channels_, words_, sent_, received_),
      watch_(rank, channels_, view_, transfers_),
      rescue_(*device_, channels_, words_, sent_, received_, view_, watch_),
      runner_(*device_, sent_, received_) {
  words_->go_on.value = kOpen;
}

DeviceRank::~DeviceRank() {
  bool is_idle = false;
  try {
    is_idle = runner_.IsIdle();
  } catch (const Error& error) {
    LogLine(error.what());
  }
  runner_.DropStreams();
  LeakOnPurpose(std::move(words_.memory()));  // which the program's stream may still look at
  if (!is_idle) LeakOnPurpose(std::move(channels_));
}

std::optional<LaunchMismatch> DeviceRank::Start(const DeviceRequest& request) {
  if (program_ == nullptr) program_ = request.stream;
  ++started_;
  const InFlight::Whole exchange{.first = last_transfer_ + 1,
                                 .kind = request.kind,
                                 .plan = request.plan,
                                 .index = request.index,
                                 .deadline_ms = request.deadline_ms,
                                 .operand_bytes = request.operand.size(),
                                 .poison = request.poison,
                                 .program = request.stream};
  const std::vector<DeviceTransfer> plan = PlanTransfers(request, rank_);
  uint64_t incoming_number = 0;
  for (const DeviceTransfer& planned : plan) {
    InFlight transfer;
    transfer.number = NextNumber(last_transfer_);
    transfer.is_last = &planned == &plan.back();
    transfer.exchange = exchange;
    transfer.transfer = planned;
    if (planned.is_own()) {
      transfer.receive.number = incoming_number + 1;  // leaves the other stream to a receive
      StartOwn(transfer);
    } else if (auto mismatch = StartTransfer(transfer)) {
      return mismatch;
    }
    incoming_number = transfer.receive.number;
  }
  return std::nullopt;
}

void DeviceRank::Add(const InFlight& transfer) {
  const std::lock_guard lock(transfers_.mutex);
  transfers_.all.push_back(transfer);
}

// The transfers' mutex is held.
InFlight& DeviceRank::Find(uint32_t number) {
  const auto found = std::ranges::find(transfers_.all, number, &InFlight::number);
  if (found == transfers_.all.end()) Throw(ErrorCode::kPeer, "the job failed before its done");
  return *found;
}

void DeviceRank::StartOwn(InFlight& own) {
  const DeviceTransfer& copy = own.transfer;
  own.receive.route = copy.route;
  own.is_pending = copy.operand.size() > eager_bytes_;
  Add(own);
  if (!own.is_pending) {
    device_->Copy(own.exchange.program, copy.result.data(), copy.operand.data(),
                  copy.result.size());
    return;
  }
  Event ready = runner_.Record(own.exchange.program);
  ReceiveByStreams(own, ready.get());
  runner_.Recycle(std::move(ready));
}

std::optional<LaunchMismatch> DeviceRank::StartTransfer(InFlight& transfer) {
  const bool has_target = transfer.transfer.target >= 0;
  const bool has_source = transfer.transfer.source >= 0;
  auto mismatch = has_target ? AgreeWithTarget(transfer) : std::nullopt;
  if (has_source) {
    if (auto with_source = AgreeWithSource(transfer)) mismatch = with_source;
  }
  if (mismatch) return mismatch;
  const bool may_be_eager =
      transfer.transfer.operand.size() <= eager_bytes_ && transfer.exchange.program == program_;
  transfer.is_pending = has_source;
  std::vector<InFlight> overdue;
  if (has_source && receipts_.empty()) overdue = ChooseReceive(transfer, may_be_eager);
  if (has_target) {
    transfer.send.route = ChooseSend(transfer, may_be_eager);
    transfer.send.marks = SendMarks(transfer);
  }
  Add(transfer);
  Launch(transfer, overdue);
  return std::nullopt;
}

// Puts the start of the transfer on streams.
void DeviceRank::Launch(const InFlight& transfer, const std::vector<InFlight>& overdue) {
  const auto& [target, source, route, operand, result, part_bytes, parts] = transfer.transfer;
  const Marks& sends = transfer.send.marks;
  StreamHandle const stream = transfer.exchange.program;
  if (source < 0) device_->Fill(stream, result.data(), std::byte{0}, result.size());
  StreamWork program(*device_, stream);
  if (Is<ZeroCopy>(transfer.send.route)) {
    runner_.OfferOperand(transfer, channels_.Outgoing(target), program);
  }
  if (!IsByProgram(sends) && last_reached_ != transfer.exchange.first) {
    last_reached_ = transfer.exchange.first;
    program.Write(words_.AddressOf(words_->reached), last_reached_);
  }
  const bool receives = source >= 0 && !Is<Eager>(transfer.receive.route);
  Event ready;
  if (receives || IsByStreams(sends) || !overdue.empty()) ready = runner_.Record(stream);
  for (const InFlight& other : overdue) ReceiveByStreams(other, ready.get());
  if (FirstChunkOf(transfer.send.route)) {
    runner_.Send(transfer, channels_.Outgoing(target), &program, ready.get());
  }
  program.Flush();
  if (receives) {
    ReceiveWhenKnown({transfer, std::move(ready)});
  } else {
    runner_.Recycle(std::move(ready));
  }
}

// Numbers the exchange on its channel, and compares it with what the target has launched there.
// Long ones are zero-copy if both ends choose that.
std::optional<LaunchMismatch> DeviceRank::AgreeWithTarget(InFlight& transfer) {
  const std::span<const std::byte> operand = transfer.transfer.operand;
  const int target = transfer.transfer.target;
  RankChannel& channel = channels_.Outgoing(target);
  const uint64_t number = transfer.send.number = ++channel.exchanges;
  const bool may_be_zero_copy = operand.size() >= channel.end->pull_bytes();
  const auto place = may_be_zero_copy && transfer.exchange.program == program_
                         ? channel.end->PlaceOf(operand)
                         : std::nullopt;
  ChannelWords& words = channel.end->words();
  WaitForRoom(number, [&] { return channel.end->Passed().value_or(words.target.last()); });
  const auto mismatch =
      Compare(target, transfer, number, words.source, words.target, place.value_or(0));
  if (may_be_zero_copy) {
    const auto own = place ? RouteChoices::Route::kZeroCopy : RouteChoices::Route::kSlots;
    const auto chosen = words.routes.Choose(number, own);
    if (chosen == RouteChoices::Route::kZeroCopy) transfer.send.route = ZeroCopy{};
  }
  return mismatch;
}

std::optional<LaunchMismatch> DeviceRank::AgreeWithSource(InFlight& transfer) {
  const int source = transfer.transfer.source;
  RankChannel& channel = channels_.Incoming(source);
  const uint64_t number = transfer.receive.number = ++channel.exchanges;
  ChannelWords& words = channel.end->words();
  WaitForRoom(number, [&] { return words.source.last(); });
  return Compare(source, transfer, number, words.target, words.source, 0);
}

// The launch log of a channel is finite. Streams fill up long before it does.
template <typename Passed>
void DeviceRank::WaitForRoom(uint64_t number, Passed passed) const {
  while (number > LaunchLog::kEntries && passed() < number - LaunchLog::kEntries &&
         !rescue_.stopped()) {
    std::this_thread::sleep_for(kLogPause);
  }
}

Route DeviceRank::ChooseSend(const InFlight& transfer, bool may_be_eager) const {
  const RankChannel& channel = channels_.Outgoing(transfer.transfer.target);
  return SendRoute(channel.state(), transfer.transfer.operand.size(),
                   {.is_zero_copy = Is<ZeroCopy>(transfer.send.route),
                    .may_be_eager = may_be_eager,
                    .overtakes = !sent_.AreStreamsIdle(),
                    .is_free = channel.IsFree(channel.chunks)});
}

// A zero-copy send is marked at its Done().
Marks DeviceRank::SendMarks(const InFlight& transfer) {
  Marks marks{};
  if (Is<Eager>(transfer.send.route)) {
    marks.at(kProgramStream) = sent_.NextFor(kProgramStream);
  } else if (const auto first_chunk = FirstChunkOf(transfer.send.route)) {
    const RankChannel& channel = channels_.Outgoing(transfer.transfer.target);
    const size_t num_bytes = transfer.transfer.operand.size();
    marks = sent_.NextForChunks(*first_chunk, NumChunks(num_bytes, channel.end->slot_bytes()));
  }
  return marks;
}

// Sets the route of the receive and numbers its chunks, if the ends have chosen. Returns the eager
// messages that must be received before, because their slots are needed.
std::vector<InFlight> DeviceRank::ChooseReceive(InFlight& transfer, bool may_be_eager) {
  const int source = transfer.transfer.source;
  const size_t num_bytes = transfer.transfer.result.size();
  RankChannel& channel = channels_.Incoming(source);
  const auto chosen = channel.ChosenRoute(transfer.receive.number, num_bytes);
  if (!chosen) return {};
  transfer.receive.route = ReceiveRoute(channel.state(), num_bytes, *chosen, may_be_eager);
  if (!FirstChunkOf(transfer.receive.route)) return {};
  channel.chunks += NumChunks(num_bytes, channel.end->slot_bytes());
  return TakeOverdue(source, channel.chunks);
}

// Eager messages whose slots are used again by chunks before `end`; our streams receive them.
std::vector<InFlight> DeviceRank::TakeOverdue(int source, uint64_t end) {
  std::vector<InFlight> overdue;
  const std::lock_guard lock(transfers_.mutex);
  for (InFlight& other : transfers_.all) {
    std::optional<Route>& route = other.receive.route;
    if (!Is<Eager>(route) || !other.is_pending || other.transfer.source != source) continue;
    const uint64_t first_chunk = std::get<Eager>(*route).first_chunk;
    if (first_chunk + kChannelSlots >= end) continue;
    route = Slots{first_chunk};
    overdue.push_back(other);
  }
  return overdue;
}

// Receipts whose chunks are numbered are first: they use their slots before all others.
void DeviceRank::ReceiveWhenKnown(Receipt receipt) {
  if (FirstChunkOf(receipt.transfer.receive.route)) {
    receipts_.push_front(std::move(receipt));
  } else {
    receipts_.push_back(std::move(receipt));
  }
  ReceiveKnown();
}

void DeviceRank::ReceiveKnown() {
  while (!receipts_.empty()) {
    InFlight& first = receipts_.front().transfer;
    std::vector<InFlight> overdue;
    if (!first.receive.route) overdue = ChooseReceive(first, false);
    if (!first.receive.route) return;
    Receipt receipt = std::move(receipts_.front());
    receipts_.pop_front();
    for (const InFlight& other : overdue) ReceiveByStreams(other, receipt.ready.get());
    ReceiveByStreams(receipt.transfer, receipt.ready.get());
    runner_.Recycle(std::move(receipt.ready));
  }
}

void DeviceRank::ReceiveByStreams(const InFlight& transfer, EventHandle ready) {
  InFlight marked;
  {
    const std::lock_guard lock(transfers_.mutex);
    const auto found = std::ranges::find(transfers_.all, transfer.number, &InFlight::number);
    if (found == transfers_.all.end()) return;  // it has been abandoned
    InFlight::Side& receive = found->receive;
    found->is_pending = false;
    receive.route = transfer.receive.route;
    if (const auto first_chunk = FirstChunkOf(receive.route)) {
      const RankChannel& channel = channels_.Incoming(transfer.transfer.source);
      const size_t num_bytes = transfer.transfer.result.size();
      receive.marks =
          received_.NextForChunks(*first_chunk, NumChunks(num_bytes, channel.end->slot_bytes()));
    } else {
      const size_t s = receive.number % kStreams;
      receive.marks.at(s) = received_.NextFor(s, found->transfer.parts);
    }
    marked = *found;
  }
  if (Is<OwnCopy>(marked.receive.route)) {
    runner_.CopyOwn(marked, ready);
  } else if (Is<ZeroCopy>(marked.receive.route)) {
    runner_.Get(marked, channels_.Incoming(marked.transfer.source), ready);
  } else {
    runner_.Receive(marked, channels_.Incoming(marked.transfer.source), nullptr, ready);
  }
}

// Exchanges that their sources have not launched by the end of the wait budget arrive through
// slots.
void DeviceRank::ReceiveAllUntil(uint32_t number) {
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
      ChannelWords& words = channels_.Incoming(first.transfer.source).end->words();
      words.routes.Choose(first.receive.number, RouteChoices::Route::kSlots);
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
    const std::lock_guard lock(transfers_.mutex);
    const auto found = std::ranges::find_if(transfers_.all, [&](const InFlight& candidate) {
      const InFlight::Whole& exchange = candidate.exchange;
      return exchange.plan == plan && exchange.index == index && !candidate.is_done();
    });
    if (found == transfers_.all.end()) {
      Throw(ErrorCode::kUsage, "exchange ", index, " of plan ", plan, " is done before its start");
    }
    first = found->number;
    last = std::ranges::find_if(found, transfers_.all.end(), &InFlight::is_last)->number;
  }
  StreamWork program(*device_, stream);
  for (uint32_t number = first; number <= last; ++number) DoneTransfer(number, program);
  program.Flush();
}

void DeviceRank::DoneTransfer(uint32_t number, StreamWork& program) {
  ReceiveElsewhere(number, program.stream());
  ReceiveAllUntil(number);
  const auto [transfer, is_received] = CountDone(number, program.stream());
  if (is_received) {
    runner_.Receive(transfer, channels_.Incoming(transfer.transfer.source), &program, nullptr);
  }
  const bool is_taken = Is<ZeroCopy>(transfer.send.route) && transfer.is_done();
  if (is_taken) {
    runner_.AwaitTaken(transfer, channels_.Outgoing(transfer.transfer.target), program);
  }
  Marks receives = transfer.receive.marks;
  if (Is<ZeroCopy>(transfer.receive.route)) {  // receives of the parts so far
    receives.at(transfer.receive.number % kStreams) -=
        transfer.transfer.parts - transfer.done_parts;
  }
  AwaitMarks(receives, received_, program);
  AwaitMarks(transfer.send.marks, sent_, program);
  program.Wait(words_.AddressOf(words_->go_on), transfer.done_number);
  if (is_taken && IsByProgram(transfer.send.marks)) {  // all waits are one call with it
    program.Write(sent_.AddressOf(kProgramStream), transfer.send.marks.at(kProgramStream));
  }
}

// Our streams receive an eager message that another stream has started.
void DeviceRank::ReceiveElsewhere(uint32_t number, StreamHandle stream) {
  InFlight eager;
  {
    const std::lock_guard lock(transfers_.mutex);
    InFlight& found = Find(number);
    std::optional<Route>& route = found.receive.route;
    if (!Is<Eager>(route) || !found.is_pending || found.exchange.program == stream) return;
    route = Slots{std::get<Eager>(*route).first_chunk};
    eager = found;
  }
  ReceiveWhenKnown({eager, runner_.Record(stream)});
}

// Counts the done of a transfer, and gives the marks of what the done itself puts on streams.
DeviceRank::AtDone DeviceRank::CountDone(uint32_t number, StreamHandle stream) {
  const std::lock_guard lock(transfers_.mutex);
  InFlight& found = Find(number);
  if (found.done_parts++ == 0) found.done_number = NextNumber(transfers_.dones);
  const bool is_received = Is<Eager>(found.receive.route) && found.is_pending;
  if (is_received) {
    found.is_pending = false;
    found.receive.marks.at(kProgramStream) = received_.NextFor(kProgramStream);
  }
  if (Is<ZeroCopy>(found.send.route) && found.is_done()) {
    const size_t s = stream == program_ ? kProgramStream : found.send.number % kStreams;
    found.send.marks.at(s) = sent_.NextFor(s);
  }
  return {found, is_received};
}

// The first program's stream keeps its own order.
void DeviceRank::AwaitMarks(const Marks& marks, const StreamProgress& progress,
                            StreamWork& program) const {
  ForEachStream(marks, [&](size_t s) {
    if (s == kProgramStream && program.stream() == program_) return;
    program.Wait(progress.AddressOf(s), marks.at(s));
  });
}

DeviceRank::Counts DeviceRank::counts() const {
  const auto [completed, in_flight_time] = watch_.counts();
  return {started_, completed, in_flight_time, runner_.gotten_bytes(), runner_.offered_bytes()};
}

}  // namespace jaxhet
