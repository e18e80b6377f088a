#include "xla_plugin/engine/device/device_engine.h"

#include <algorithm>
#include <iterator>
#include <tuple>

#include "xla_plugin/base/thread.h"

namespace jaxhet {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLookPeriod{5};
constexpr milliseconds kIdlePeriod{200};  // to see a failure while nothing is in flight
constexpr milliseconds kAbandonTimeout{20'000};
constexpr milliseconds kAbandonTurn{1};
constexpr milliseconds kPlanTimeout{2'000};  // for a peer's plan that is on its way

void CopyUnlessSame(Device& device, const DeviceRequest& request) {
  if (request.result.data() == request.operand.data()) return;
  device.Copy(request.stream, request.result.data(), request.operand.data(),
              request.operand.size());
}

Error AtExchange(const RankFacts& own, const Error& cause) {
  return {cause.code(), StrCat(WhereText(own), cause.text()), own.process};
}

}  // namespace

// The exchanges of `jaxhet.start` on one device: an exchange moves a copy of the operand into
// memory of its own, from which each `jaxhet.finish` copies one member's part.
class DeviceEngine::Handles {
 public:
  explicit Handles(DeviceRank& rank)
      : rank_(rank), stream_(rank.device().CreateStream(StreamPriority::kNormal)) {}

  // Allocates memory for a start's exchange, when its plan is registered: not in a program, whose
  // launch would wait. The driver may wait for running programs, which end
  // without this thread. No arena has room for it: the size is unknown before, and can be that of
  // all parameters.
  void Reserve(int64_t handle, size_t operand_bytes, size_t group_size) {
    const std::lock_guard lock(mutex_);
    Memory& memory = memory_[{handle, operand_bytes, group_size}];
    if (memory.operand.get() != nullptr) return;
    memory.operand = rank_.device().Allocate(operand_bytes);
    memory.result = rank_.device().Allocate(operand_bytes * group_size);
  }

  // Called as DeviceRank's functions of these names are. The request is a start or a finish.
  std::optional<LaunchMismatch> Start(const DeviceRequest& request) {
    const std::lock_guard lock(mutex_);
    Handle& handle = handles_[request.handle];
    DeviceRequest exchange = request;
    if (request.is_finish) {
      const bool is_own = SourceOf(request.pairs, request.rank) == request.rank;
      if (is_own && !handle.is_known) CopyUnlessSame(rank_.device(), request);
      if (is_own) return std::nullopt;
      if (!handle.is_known) return rank_.Start(request);
      exchange.operand = {};  // the data is on the way; the ranks compare their programs
      exchange.result = {};
    } else {
      handle.state.Start(request.plan, request.index);
      handle.group = request.group;
      handle.num_bytes = request.operand.size();
      const auto memory = memory_.find({request.handle, handle.num_bytes, handle.group.size()});
      if (memory == memory_.end()) {
        Throw(ErrorCode::kUsage, "the plan of this jaxhet.start has no memory for ",
              handle.num_bytes, " bytes of ", handle.group.size(),
              " ranks; please report this with a dump (JAXHET_DUMP)");
      }
      auto* const operand = static_cast<std::byte*>(memory->second.operand.get());
      handle.result = static_cast<std::byte*>(memory->second.result.get());
      handle.is_known = true;
      handle.is_done = false;
      CopyUnlessSame(rank_.device(), request);
      rank_.device().Copy(request.stream, operand, request.operand.data(), handle.num_bytes);
      exchange.operand = {operand, handle.num_bytes};
      exchange.result = {handle.result, handle.num_bytes * handle.group.size()};
    }
    exchange.is_detached = true;
    return rank_.Start(exchange);
  }

  void Done(const DeviceRequest& request) {
    if (!request.is_finish) return;
    const std::lock_guard lock(mutex_);
    Handle& handle = handles_[request.handle];
    const int source = SourceOf(request.pairs, request.rank);
    if (!handle.is_known) {
      if (source != request.rank) rank_.Done(request.stream, request.plan, request.index);
      return;
    }
    if (request.result.size() != handle.num_bytes) Throw(ErrorCode::kUsage, kNotLatest);
    if (source == request.rank) handle.state.Finish();
    Await(handle, request.stream);
    const size_t part = PlaceIn(handle.group, source) * handle.num_bytes;
    rank_.device().Copy(request.stream, request.result.data(), handle.result + part,
                        handle.num_bytes);
    if (source != request.rank) rank_.Done(stream_.get(), request.plan, request.index);
  }

  // Lets the exchanges end that were never finished.
  void Drain() {
    const std::lock_guard lock(mutex_);
    for (auto& [key, handle] : handles_) {
      if (handle.state.is_started()) Await(handle, stream_.get());
    }
  }

  Unfinished unfinished() const {
    const std::lock_guard lock(mutex_);
    Unfinished found;
    for (const auto& [key, handle] : handles_) {
      if (handle.state.is_started()) found.emplace(handle.state.plan(), handle.state.index());
    }
    return found;
  }

 private:
  struct Memory {
    DeviceMemory operand;
    DeviceMemory result;  // parts of all members
  };
  struct Handle {
    HandleState state;
    std::byte* result = nullptr;
    size_t num_bytes = 0;
    SharedList<int> group;
    bool is_known = false;  // it was started
    bool is_done = false;   // the program's stream waits for its data
  };

  void Await(Handle& handle, StreamHandle stream) {
    if (!handle.is_done) rank_.Done(stream, handle.state.plan(), handle.state.index());
    handle.is_done = true;
  }

  DeviceRank& rank_;
  const Stream stream_;
  mutable std::mutex mutex_;
  // By key of a handle, bytes and number of members: programs of several shapes have one name.
  std::map<std::tuple<int64_t, size_t, size_t>, Memory> memory_;
  std::map<int64_t, Handle> handles_;  // by key
};

DeviceEngine::DeviceEngine(JobView& job, Options options,
                           std::vector<std::unique_ptr<DeviceRank>> ranks)
    : job_(job), options_(std::move(options)), ranks_(std::move(ranks)) {
  for (const auto& rank : ranks_) handles_[rank->rank()] = std::make_unique<Handles>(*rank);
  watch_ = StartThread("jaxhet-devices", [this] { Watch(); });
}

DeviceEngine::~DeviceEngine() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  watch_.join();
}

DeviceRank& DeviceEngine::RankOf(int ordinal) {
  const auto found = std::ranges::find_if(
      ranks_, [&](const auto& rank) { return rank->device().info().ordinal == ordinal; });
  if (found != ranks_.end()) return **found;
  Throw(ErrorCode::kUsage, "device ", ordinal, " is not one of this process's ranks");
}

void DeviceEngine::Start(int ordinal, const DeviceRequest& request) {
  DeviceRank& rank = RankOf(ordinal);
  Failing(rank, request.plan, request.index, [&] {
    const auto mismatch =
        request.handle == 0 ? rank.Start(request) : handles_.at(rank.rank())->Start(request);
    if (mismatch) throw MismatchOf(rank.rank(), *mismatch);
  });
  const std::lock_guard lock(mutex_);
  if (!std::exchange(is_active_, true)) changed_.notify_all();
}

void DeviceEngine::Done(int ordinal, const DeviceRequest& request) {
  DeviceRank& rank = RankOf(ordinal);
  Failing(rank, request.plan, request.index, [&] {
    if (request.handle != 0) return handles_.at(rank.rank())->Done(request);
    rank.Done(request.stream, request.plan, request.index);
  });
}

void DeviceEngine::Reserve(int rank, int64_t handle, size_t operand_bytes, size_t group_size) {
  handles_.at(rank)->Reserve(handle, operand_bytes, group_size);
}

Unfinished DeviceEngine::unfinished() const {
  Unfinished found;
  for (const auto& [rank, handles] : handles_) found.merge(handles->unfinished());
  return found;
}

// After an error XLA frees the program's buffers: nothing of ours may be under way then.
template <typename Function>
void DeviceEngine::Failing(DeviceRank& rank, int64_t plan, int64_t index, Function function) {
  if (const auto failure = job_.failure()) {
    Abandon();
    throw Error(*failure);
  }
  try {
    function();
    // Results of work that was put on streams while the job failed are not poisoned, so the program
    // must stop.
    if (const auto failure = job_.failure()) throw Error(*failure);
  } catch (const Error& error) {
    const Error named = error.failed_process() >= 0
                            ? error
                            : AtExchange(job_.FactsOf(rank.rank(), plan, index), error);
    job_.Fail(named);
    Abandon();
    const auto failure = job_.failure();
    throw failure ? Error(*failure) : named;
  }
}

Error DeviceEngine::MismatchOf(int rank, const LaunchMismatch& mismatch) {
  const auto& [peer_rank, own, theirs] = mismatch;
  const Time limit = Clock::now() + kPlanTimeout;
  const RankFacts ours = job_.FactsOf(rank, own.plan, own.index);
  RankFacts peer = job_.FactsOf(peer_rank, theirs.plan, theirs.index);
  while (!peer.plan && Clock::now() < limit) {
    std::this_thread::sleep_for(milliseconds(1));
    peer = job_.FactsOf(peer_rank, theirs.plan, theirs.index);
  }
  if (!peer.plan) return UnknownProgramError(ours, peer);
  if (own.plan != theirs.plan) return ProgramMismatchError(ours, peer);
  return ExchangeMismatchError(ours, peer, own.num_bytes, theirs.num_bytes);
}

Error DeviceEngine::LateOf(int rank, const LateTransfer& late) {
  const RankFacts own = job_.FactsOf(rank, late.plan, late.index);
  const auto [plan, index, num_bytes] = late.last.value_or(Launch{});
  const RankFacts peer = job_.FactsOf(late.peer_rank, plan, index);
  LatePeer waited_for{.name = peer.rank_and_process,
                      .waited = late.waited,
                      .has_started = late.has_launched,
                      .last_exchange = {},
                      .last_ago = {}};
  if (late.last) waited_for.last_exchange = peer.exchange;
  return LateError(own, {&waited_for, 1}, peer.process);
}

void DeviceEngine::Watch() {
  std::unique_lock lock(mutex_);
  while (!closing_) {
    changed_.wait_for(lock, is_active_ ? kLookPeriod : kIdlePeriod);
    lock.unlock();
    if (job_.failure()) {
      Abandon();
      return;
    }
    const size_t in_flight = Look();
    lock.lock();
    is_active_ = in_flight > 0;  // later starts are found after kIdlePeriod
  }
}

size_t DeviceEngine::Look() {
  size_t in_flight = 0;
  for (const auto& rank : ranks_) {
    try {
      const WatchReport report = rank->watch().Look(milliseconds(options_.deadline_ms),
                                                    milliseconds(options_.first_deadline_ms));
      in_flight += report.in_flight;
      if (report.broken) job_.Lose(report.broken->peer_rank, report.broken->why);
      if (report.mismatch) throw MismatchOf(rank->rank(), *report.mismatch);
      if (report.late) throw LateOf(rank->rank(), *report.late);
    } catch (const Error& error) {
      job_.Fail(error);
    }
  }
  return in_flight;
}

bool DeviceEngine::WaitIdle(milliseconds timeout) {
  const Time limit = Clock::now() + timeout;
  for (auto& [rank, handles] : handles_) handles->Drain();
  const auto is_drained = [&](const auto& rank) {
    return rank->watch().IsDrained([&](int target) { return job_.HasLeft(target); });
  };
  while (Look() > 0 || !std::ranges::all_of(ranks_, is_drained)) {
    if (job_.failure() || Clock::now() >= limit) return false;
    std::this_thread::sleep_for(kLookPeriod);
  }
  return true;
}

std::optional<DeviceWait> DeviceEngine::OldestWait(std::span<const int> peer_ranks) const {
  std::optional<DeviceWait> oldest;
  for (const auto& rank : ranks_) {
    const auto wait = rank->watch().OldestWait(peer_ranks);
    if (wait && (!oldest || wait->since < oldest->since)) oldest = wait;
  }
  return oldest;
}

// Ends ranks in short turns: the program of one may wait for that of another, in NCCL.
void DeviceEngine::Abandon() {
  // One thread at a time: a stream that goes on may write to channels, which must not be ended
  // by another thread meanwhile.
  const std::lock_guard lock(abandon_mutex_);
  std::vector<DeviceRank*> left;
  for (const auto& rank : ranks_) {
    rank->watch().Stop();
    left.push_back(rank.get());
  }
  const auto is_over = [](DeviceRank* rank) {
    try {
      return rank->watch().Abandon(kAbandonTurn);
    } catch (const Error& error) {
      LogLine(error.what());
      return true;
    }
  };
  const Time limit = Clock::now() + kAbandonTimeout;
  while (!left.empty() && Clock::now() < limit) std::erase_if(left, is_over);
  for (DeviceRank* const rank : left) {
    LogLine(StrCat("jaxhet: ", rank->device().info().ToString(),
                   " did not end its exchanges after the job had failed; end this process"));
  }
}

std::vector<FlightRecord> DeviceEngine::FlightRecords() const {
  std::vector<FlightRecord> records;
  for (const auto& rank : ranks_)
    std::ranges::move(rank->watch().FlightRecords(), std::back_inserter(records));
  std::ranges::sort(records, {}, &FlightRecord::started);
  return records;
}

std::map<std::string, uint64_t> DeviceEngine::Stats() const {
  std::map<std::string, uint64_t> stats;
  for (const auto& rank : ranks_) rank->AddTo(stats);
  return stats;
}

std::vector<PeerCounts> DeviceEngine::Counts() const {
  std::vector<PeerCounts> counts;
  for (const auto& rank : ranks_)
    std::ranges::move(rank->channels().Counts(), std::back_inserter(counts));
  return counts;
}

}  // namespace jaxhet
