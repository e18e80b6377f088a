#include "xla_plugin/engine/device/device_rank.h"

#include <algorithm>
#include <thread>
#include <type_traits>
#include <utility>

#include "xla_plugin/base/error.h"

namespace jaxhet {
namespace {

constexpr std::chrono::microseconds kLogPause{50};  // between looks at a peer's launches
// For work whose last word has been seen: a driver calls its stream idle a little later.
constexpr std::chrono::milliseconds kRetireTime{1'000};

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
                                      const LaunchLog& own, const LaunchLog& peer, uint64_t place) {
  const Launch launch = LaunchOf(transfer);
  own.Publish(number, launch, place);
  const auto theirs = peer.Find(number);
  if (!theirs || *theirs == launch) return std::nullopt;
  return LaunchMismatch{peer_rank, launch, *theirs};
}

// How long ReceiveUntil() waits for sources' launches: at most so long, and in vain for this part
// of all time. That is enough to bring processes together that launch at the same pace.
constexpr std::chrono::milliseconds kMaxLaunchWait{10};
constexpr int kLaunchWaitFraction = 8;

}  // namespace

DeviceRank::DeviceRank(int rank, std::unique_ptr<Device> device, size_t eager_bytes)
    : rank_(rank),
      device_(std::move(device)),
      words_(*device_),
      channels_(rank),
      eager_bytes_(eager_bytes),
      sent_(words_, words_->sent),
      received_(words_, words_->received),
      watch_(rank, *device_, channels_, words_, sent_, received_, transfers_),
      runner_(*device_, sent_, received_) {
  words_->go_on.value = kOpen;
}

DeviceRank::~DeviceRank() {
  bool is_idle = false;
  try {
    is_idle = runner_.IsIdleWithin(kRetireTime);
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
                                 .program = request.stream,
                                 .is_detached = request.is_detached};
  const std::vector<DeviceTransfer> plan = PlanTransfers(request);
  for (const DeviceTransfer& planned : plan) {
    InFlight transfer;
    transfer.number = NextNumber(last_transfer_);
    transfer.is_last = &planned == &plan.back();
    transfer.exchange = exchange;
    transfer.transfer = planned;
    if (planned.is_own) {
      transfers_.Add(transfer);
      device_->Copy(request.stream, planned.result.data(), planned.operand.data(),
                    planned.result.size());
    } else if (auto mismatch = StartTransfer(transfer)) {
      return mismatch;
    }
  }
  return std::nullopt;
}

std::optional<LaunchMismatch> DeviceRank::StartTransfer(InFlight& transfer) {
  const bool has_target = transfer.transfer.target >= 0;
  const bool has_source = transfer.transfer.source >= 0;
  auto mismatch = has_target ? AgreeWithTarget(transfer) : std::nullopt;
  if (has_source) {
    if (const auto with_source = AgreeWithSource(transfer)) mismatch = with_source;
  }
  if (mismatch) return mismatch;
  const bool may_be_eager = transfer.transfer.operand.size() <= eager_bytes_ &&
                            transfer.exchange.program == program_ && !transfer.exchange.is_detached;
  transfer.is_pending = has_source;
  std::vector<InFlight> overdue;
  if (has_source && receipts_.empty()) overdue = ChooseReceive(transfer, may_be_eager);
  if (has_target) {
    transfer.send.route = ChooseSend(transfer, may_be_eager);
    transfer.send.marks = SendMarks(transfer);
  }
  transfers_.Add(transfer);
  Launch(transfer, overdue);
  return std::nullopt;
}

// Puts the start of the transfer on streams.
void DeviceRank::Launch(const InFlight& transfer, const std::vector<InFlight>& overdue) {
  const auto [target, source] = std::pair(transfer.transfer.target, transfer.transfer.source);
  const Marks& sends = transfer.send.marks;
  auto* const stream = transfer.exchange.program;
  const std::span<std::byte> result = transfer.transfer.result;
  if (source < 0) device_->Fill(stream, result.data(), std::byte{0}, result.size());
  const bool receives = source >= 0 && !transfer.receive.route.is_eager();
  Event ready;  // an eager exchange needs none
  if (!IsByProgram(sends) || receives || !overdue.empty()) ready = runner_.Record(stream);
  for (const InFlight& other : overdue) Receive(other, ready.get());
  if (transfer.send.route.has_chunks()) {
    StreamWork program(*device_, stream);
    runner_.Send(transfer, channels_.Outgoing(target), &program, ready.get());
    program.Flush();
  }
  if (!IsByProgram(sends)) Announce(transfer, ready.get());
  if (receives) {
    AddReceipt(transfer, std::move(ready));
  } else {
    runner_.Recycle(std::move(ready));
  }
}

// Tells the target that it can read the operand, and the watch that the program is at the start.
void DeviceRank::Announce(const InFlight& transfer, EventHandle ready) {
  const bool offers = transfer.send.route.is_zero_copy();
  const bool is_first = last_reached_ != transfer.exchange.first;
  if (!offers && !is_first) return;
  StreamWork work = runner_.Announcement(ready);
  if (offers) runner_.OfferOperand(transfer, channels_.Outgoing(transfer.transfer.target), work);
  if (is_first) {
    last_reached_ = transfer.exchange.first;
    work.Write(words_.AddressOf(words_->reached), last_reached_);
  }
  work.Flush();
}

// Numbers the exchange on its channel, and compares it with what the target has launched there.
// Long ones are zero-copy if both ends choose that.
std::optional<LaunchMismatch> DeviceRank::AgreeWithTarget(InFlight& transfer) {
  const std::span<const std::byte> operand = transfer.transfer.operand;
  const int target = transfer.transfer.target;
  RankChannel& channel = channels_.Outgoing(target);
  const uint64_t number = transfer.send.number = ++channel.exchanges;
  const bool may_be_zero_copy = operand.size() >= channel.end->pull_bytes();
  const bool is_awaited = transfer.exchange.program == program_ && !transfer.exchange.is_detached;
  const auto place = may_be_zero_copy && is_awaited ? channel.end->PlaceOf(operand) : std::nullopt;
  const LaunchLog own_log = channel.end->source_log();
  const LaunchLog peer_log = channel.end->target_log();
  WaitForRoom(own_log, number, [&] { return channel.end->Passed().value_or(peer_log.last()); });
  const auto mismatch = Compare(target, transfer, number, own_log, peer_log, place.value_or(0));
  if (may_be_zero_copy) {
    const auto own = place ? RouteChoices::Route::kZeroCopy : RouteChoices::Route::kSlots;
    const auto chosen = channel.end->routes().Choose(number, own);
    if (chosen == RouteChoices::Route::kZeroCopy) transfer.send.route.kind = Route::Kind::kZeroCopy;
  }
  channel.end->Launched();
  return mismatch;
}

std::optional<LaunchMismatch> DeviceRank::AgreeWithSource(InFlight& transfer) {
  const int source = transfer.transfer.source;
  RankChannel& channel = channels_.Incoming(source);
  const uint64_t number = transfer.receive.number = ++channel.exchanges;
  const LaunchLog own_log = channel.end->target_log();
  const LaunchLog peer_log = channel.end->source_log();
  WaitForRoom(own_log, number, [&] { return peer_log.last(); });
  return Compare(source, transfer, number, own_log, peer_log, 0);
}

// The launch log of a channel is finite. Streams fill up long before it does.
template <typename Passed>
void DeviceRank::WaitForRoom(const LaunchLog& log, uint64_t number, Passed passed) const {
  while (number > log.capacity() && passed() < number - log.capacity() && !watch_.stopped()) {
    std::this_thread::sleep_for(kLogPause);
  }
}

Route DeviceRank::ChooseSend(const InFlight& transfer, bool may_be_eager) const {
  const RankChannel& channel = channels_.Outgoing(transfer.transfer.target);
  if (transfer.send.route.is_zero_copy()) return transfer.send.route;
  const bool is_eager = may_be_eager && channel.IsShort(transfer.transfer.operand.size()) &&
                        sent_.AreStreamsIdle() && channel.IsFree(channel.chunks);
  return {is_eager ? Route::Kind::kEager : Route::Kind::kSlots, channel.chunks};
}

// The mark of a zero-copy send is given at its Done().
Marks DeviceRank::SendMarks(const InFlight& transfer) {
  Marks marks{};
  if (transfer.send.route.is_eager()) {
    marks.at(kProgramStream) = sent_.NextFor(kProgramStream);
  } else if (transfer.send.route.has_chunks()) {
    const RankChannel& channel = channels_.Outgoing(transfer.transfer.target);
    const size_t num_bytes = transfer.transfer.operand.size();
    marks = sent_.NextForChunks(transfer.send.route.first_chunk,
                                NumChunks(num_bytes, channel.end->slot_bytes()));
  }
  return marks;
}

void DeviceRank::Done(StreamHandle stream, int64_t plan, int64_t index) {
  uint32_t first = 0;
  uint32_t last = 0;
  bool is_eager = false;
  {
    const std::lock_guard lock(transfers_.mutex);
    const auto found = std::ranges::find_if(transfers_.all, [&](const InFlight& candidate) {
      const InFlight::Whole& exchange = candidate.exchange;
      return exchange.plan == plan && exchange.index == index && !candidate.is_done();
    });
    if (found == transfers_.all.end()) {
      Throw(ErrorCode::kUsage, "exchange ", index, " of plan ", plan, " is done before its start");
    }
    const auto end = std::ranges::find_if(found, transfers_.all.end(), &InFlight::is_last);
    first = found->number;
    last = end->number;
    is_eager = std::any_of(found, end + 1, [&](const InFlight& transfer) {
      return transfer.receive.route.is_eager() && transfer.is_pending &&
             transfer.exchange.program == stream;
    });
  }
  StreamWork work = is_eager ? StreamWork(*device_, stream) : runner_.DoneWork();
  try {
    for (uint32_t number = first; number <= last; ++number) DoneTransfer(number, stream, work);
  } catch (const Error&) {
    work.Flush();  // the job failed in between, and its end waits for the marks given so far
    throw;
  }
  work.Flush();
  if (!is_eager) runner_.Follow(stream);
}

void DeviceRank::DoneTransfer(uint32_t number, StreamHandle program, StreamWork& work) {
  ReceiveElsewhere(number, program);
  ReceiveUntil(number);
  const auto [transfer, is_received] = CountDone(number);
  if (is_received) {
    runner_.Receive(transfer, channels_.Incoming(transfer.transfer.source), &work, nullptr);
  }
  const uint32_t taken_mark = transfer.send.marks.at(kDoneStream);
  if (taken_mark != 0) {
    const uint64_t sent = transfer.send.number;
    const DeviceChannel& end = *channels_.Outgoing(transfer.transfer.target).end;
    work.Wait(end.AddressOf(end.words().TakenOf(sent)), DeviceNumber(sent));
  }
  Marks receives = transfer.receive.marks;
  if (transfer.receive.route.is_zero_copy()) {  // receives of the parts so far
    receives.at(transfer.receive.number % kStreams) -=
        transfer.transfer.parts - transfer.done_parts;
  }
  AwaitMarks(receives, received_, work);
  AwaitMarks(transfer.send.marks, sent_, work);
  work.Wait(words_.AddressOf(words_->go_on), transfer.done_number);
  if (taken_mark != 0) work.Write(sent_.AddressOf(kDoneStream), taken_mark);
}

// Our streams receive an eager message that another stream has started.
void DeviceRank::ReceiveElsewhere(uint32_t number, StreamHandle program) {
  InFlight eager;
  {
    const std::lock_guard lock(transfers_.mutex);
    InFlight& found = transfers_.Find(number);
    Route& route = found.receive.route;
    if (!route.is_eager() || !found.is_pending || found.exchange.program == program) return;
    route.kind = Route::Kind::kSlots;
    eager = found;
  }
  AddReceipt(eager, runner_.Record(program));
}

// Counts the done of a transfer, and gives the marks of what the done itself puts on streams.
DeviceRank::AtDone DeviceRank::CountDone(uint32_t number) {
  const std::lock_guard lock(transfers_.mutex);
  InFlight& found = transfers_.Find(number);
  if (found.done_parts++ == 0) found.done_number = NextNumber(transfers_.dones);
  const bool is_received = found.receive.route.is_eager() && found.is_pending;
  if (is_received) {
    found.is_pending = false;
    found.receive.marks.at(kProgramStream) = received_.NextFor(kProgramStream);
  }
  if (found.send.route.is_zero_copy() && found.is_done()) {
    found.send.marks.at(kDoneStream) = sent_.NextFor(kDoneStream);
  }
  return {found, is_received};
}

// The first program's stream keeps its own order, and the done itself marks the rest.
void DeviceRank::AwaitMarks(const Marks& marks, const StreamProgress& progress,
                            StreamWork& work) const {
  ForEachStream(marks, [&](size_t s) {
    if (s == kDoneStream || (s == kProgramStream && work.stream() == program_)) return;
    work.Wait(progress.AddressOf(s), marks.at(s));
  });
}

void DeviceRank::AddTo(std::map<std::string, uint64_t>& stats) const {
  const auto [completed, in_flight_time] = watch_.counts();
  const auto in_flight = std::chrono::duration_cast<std::chrono::microseconds>(in_flight_time);
  stats["exchanges_started"] += started_;
  stats["exchanges_completed"] += completed;
  stats["bytes_zero_copy_received"] += runner_.read_bytes();
  stats["bytes_zero_copy_sent"] += runner_.offered_bytes();
  stats["in_flight_us"] += static_cast<uint64_t>(in_flight.count());
  for (const PeerCounts& counts : channels_.Counts()) {
    stats["bytes_sent_" + counts.transport] += counts.bytes_sent;
    stats["bytes_received_" + counts.transport] += counts.bytes_received;
  }
}

std::vector<InFlight> DeviceRank::ChooseReceive(InFlight& transfer, bool may_be_eager) {
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
std::vector<InFlight> DeviceRank::TakeOverdue(int source, uint64_t end) {
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
void DeviceRank::AddReceipt(const InFlight& transfer, Event ready) {
  if (transfer.receive.route.has_chunks()) {
    receipts_.push_front({transfer, std::move(ready)});
  } else {
    receipts_.push_back({transfer, std::move(ready)});
  }
  ReceiveKnown();
}

void DeviceRank::ReceiveKnown() {
  while (!receipts_.empty()) {
    InFlight& first = receipts_.front().transfer;
    std::vector<InFlight> overdue;
    if (first.receive.route.is_none()) overdue = ChooseReceive(first, false);
    if (first.receive.route.is_none()) return;
    Receipt receipt = std::move(receipts_.front());
    receipts_.pop_front();
    for (const InFlight& other : overdue) Receive(other, receipt.ready.get());
    Receive(receipt.transfer, receipt.ready.get());
    runner_.Recycle(std::move(receipt.ready));
  }
}

void DeviceRank::Receive(const InFlight& transfer, EventHandle ready) {
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

void DeviceRank::ReceiveUntil(uint32_t number) {
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
    gave_up |= watch_.stopped() || Clock::now() - begin >= wait_budget;
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
