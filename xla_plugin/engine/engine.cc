#include "xla_plugin/engine/engine.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <map>
#include <mutex>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"
#include "xla_plugin/base/thread.h"

namespace jaxhet {
namespace {

constexpr size_t kReservedFds = size_t{1} << 14;
constexpr std::chrono::seconds kLaggardsTimeout{10};

struct Table {
  std::mutex mutex;
  std::map<int64_t, std::weak_ptr<Engine>> engines;
};

Table& TheTable() {
  static auto* const table = new Table;  // outlives every thread
  return *table;
}

}  // namespace

using std::chrono::milliseconds;

Engine::Engine(int process, int num_processes, const Options& options)
    : pid_(getpid()),
      process_(process),
      progress_(std::make_shared<ProgressEngine>(process, num_processes, options)),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      options_(options) {
  if (!epoll_ || !wake_) ThrowErrno("epoll_create1, eventfd");
  epoll_event event{.events = EPOLLIN, .data = {.ptr = nullptr}};
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event) != 0) ThrowErrno("epoll_ctl");
  inherited_fds_ = {epoll_.get(), wake_.get()};
  inherited_fds_.reserve(kReservedFds);  // a fork may meet an addition
}

Engine::~Engine() { Close(milliseconds(0)); }

void Engine::CheckUsable() const {
  if (getpid() == pid_) return;
  Throw(ErrorCode::kUsage,
        "this process was forked from one that runs jaxhet and has no part in the job. Start it "
        "with the 'spawn' method.");
}

void Engine::ThrowClosed() { Throw(ErrorCode::kUsage, "jaxhet is shut down in this process"); }

void Engine::AddPeer(PeerSpec spec) {
  CheckUsable();
  specs_.push_back(std::move(spec));
}

void Engine::Connect(milliseconds timeout) {
  CheckUsable();
  const Time deadline = Clock::now() + timeout;
  try {
    // A peer that is not done with the others yet is silent for as long as that may take.
    Join(std::exchange(specs_, {}), deadline, deadline);
  } catch (const Error& error) {
    Fail(error);
    throw Error(*failure());
  }
  progress_thread_ = StartThread("jaxhet", [this] { Progress(); });
}

void Engine::JoinPeer(PeerSpec spec, milliseconds timeout) {
  CheckUsable();
  std::vector<PeerSpec> specs;
  specs.push_back(std::move(spec));
  Join(std::move(specs), Clock::now() + timeout, /*silent_until=*/{});
}

void Engine::Join(std::vector<PeerSpec> specs, Time deadline, Time silent_until) {
  const auto newcomers = std::make_shared<Newcomers>();
  {
    const std::lock_guard lock(monitor_);
    if (!progress_) ThrowClosed();
    for (PeerSpec& spec : specs) progress_->Invite(std::move(spec), *newcomers);
    newcomers->engine = progress_;
  }
  Negotiate(process_, newcomers->introductions, deadline);
  Complete(Submit([this, newcomers, silent_until](ProgressEngine& progress) {
    try {
      for (Pollable* const pollable : progress.Admit(*newcomers, silent_until)) Poll(pollable);
    } catch (const Error& error) {
      progress.Fail(error);
    }
  }));
}

void Engine::Poll(Pollable* pollable) {
  epoll_event event{.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, .data = {.ptr = pollable}};
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, pollable->fd(), &event) == 0) {
    inherited_fds_.push_back(pollable->fd());
  } else if (errno != EEXIST) {  // connections may share one
    ThrowErrno("epoll_ctl");
  }
}

void Engine::SetRanks(std::vector<RankInfo> ranks) {
  {
    const std::lock_guard lock(inbox_mutex_);
    device_ids_.clear();
    own_ranks_.clear();
    for (const RankInfo& rank : ranks) {
      if (rank.process == process_) own_ranks_.push_back(static_cast<int>(device_ids_.size()));
      device_ids_.push_back(rank.device_id);
    }
  }
  Complete(
      Submit([ranks = std::move(ranks)](ProgressEngine& progress) { progress.SetRanks(ranks); }));
}

int Engine::RankOfDevice(int64_t device_id) const {
  const std::lock_guard lock(inbox_mutex_);
  const auto found = std::ranges::find(device_ids_, device_id);
  if (found != device_ids_.end()) return static_cast<int>(found - device_ids_.begin());
  Throw(ErrorCode::kUsage, "device ", device_id, " is not one of the job's ", device_ids_.size());
}

std::shared_ptr<const RankExchange> Engine::Planned(int64_t plan, int64_t index, int rank) const {
  const std::lock_guard lock(inbox_mutex_);
  const auto found = plans_.find(plan);
  if (found == plans_.end()) {
    Throw(ErrorCode::kUsage, "this process has no plan ", plan,
          "; compile the program in this job");
  }
  const Prepared& exchanges = *found->second;
  if (index < 0 || std::cmp_greater_equal(index, exchanges.size())) {
    Throw(ErrorCode::kUsage, "exchange ", index, " is not in plan ", plan, ", which has ",
          exchanges.size(), "; please report this with a dump (JAXHET_DUMP)");
  }
  const auto& parts = exchanges[static_cast<size_t>(index)];
  const auto part = parts.find(rank);
  if (part != parts.end()) return {found->second, &part->second};
  Throw(ErrorCode::kUsage, "rank ", rank, " is in no group of exchange ", index);
}

void Engine::AddPlan(int64_t plan, std::string text, std::string program,
                     const std::vector<PlannedExchange>& exchanges) {
  std::vector<int> own_ranks;
  {
    const std::lock_guard lock(inbox_mutex_);
    own_ranks = own_ranks_;
  }
  const auto devices = FindDevices();
  Prepared prepared;
  for (const PlannedExchange& exchange : exchanges) {
    prepared.push_back(PartsOf(exchange, plan, std::ssize(prepared), own_ranks));
    if (!devices || exchange.handle == 0 || exchange.is_finish) continue;
    for (const auto& [rank, part] : prepared.back()) {
      devices->Reserve(rank, exchange.handle, CheckedCast<size_t>(exchange.handle_bytes),
                       part.group.size());
    }
  }
  {
    const std::lock_guard lock(inbox_mutex_);
    plans_[plan] = std::make_shared<const Prepared>(std::move(prepared));
  }
  Complete(Submit([plan, text = std::move(text), program = std::move(program),
                   on_devices = devices != nullptr](ProgressEngine& progress) {
    progress.AddPlan(plan, text, program);
    if (on_devices) progress.PublishPlan(plan);
  }));
}

void Engine::SubmitUnlessClosed(Command command) {
  try {
    Complete(Submit(std::move(command)));
  } catch (const Error&) {
    if (!closed_) throw;
  }
}

void Engine::Fail(const Error& error) {
  SubmitUnlessClosed([error](ProgressEngine& progress) { progress.Fail(error); });
}

void Engine::Lose(int peer_rank, std::string_view why) {
  SubmitUnlessClosed([peer_rank, why = std::string(why)](ProgressEngine& progress) {
    progress.Lose(peer_rank, why);
  });
}

void Engine::Start(ExchangeRequest request) {
  if (request.handle == 0) return StartExchange(std::move(request));
  try {
    if (!request.is_finish) {
      StartExchange(handles_.Start(request));
      return request.done(failure().get());
    }
    auto meeting = handles_.Finish(request);
    if (!meeting) return StartExchange(std::move(request));
    StartExchange(*std::move(meeting));
    handles_.Deliver(request);
  } catch (const Error& error) {
    const RankFacts own = FactsOf(request.rank, request.plan, request.index);
    const Error named(error.code(), StrCat(WhereText(own), error.text()));
    request.done(&named);
  }
}

void Engine::StartExchange(ExchangeRequest request) {
  const int64_t id = ++last_id_;
  // A std::function must be copyable.
  const auto shared = std::make_shared<ExchangeRequest>(std::move(request));
  std::vector<Completion> completions;
  try {
    completions =
        Submit([shared, id](ProgressEngine& progress) { progress.Start(std::move(*shared), id); });
  } catch (const Error& error) {
    shared->done(&error);
    return;
  }
  const auto own = std::ranges::find(completions, id, &Completion::id);
  if (own != completions.end()) {
    own->done(own->error.get());
    completions.erase(own);
  }
  Complete(std::move(completions));
}

std::vector<Completion> Engine::Submit(Command command) {
  CheckUsable();
  {
    const std::lock_guard lock(inbox_mutex_);
    if (closed_) ThrowClosed();
    inbox_.push_back(std::move(command));
  }
  std::unique_lock lock(monitor_, std::try_to_lock);
  if (!lock) {
    Wake();
    return {};
  }
  if (!progress_) return {};  // Close() has run the command
  RunCommands();
  Publish();
  const bool wake = progress_->HasWork() || progress_->NextTimer() < wakes_at_.load();
  std::vector<Completion> completions = progress_->TakeCompletions();
  lock.unlock();
  if (wake) Wake();
  return completions;
}

void Engine::RunCommands() {
  std::vector<Command> commands;
  {
    const std::lock_guard lock(inbox_mutex_);
    commands.swap(inbox_);
  }
  for (const Command& command : commands) command(*progress_);
  progress_->ServeOwn();
}

void Engine::Complete(std::vector<Completion> completions) {
  for (Completion& completion : completions) {
    pool_.Run([done = std::move(completion.done), error = std::move(completion.error)] {
      done(error.get());
    });
  }
}

void Engine::Progress() {
  std::array<epoll_event, 64> events{};
  int num_events = 0;
  while (Turn(std::span(events).first(static_cast<size_t>(std::max(num_events, 0))))) {
    const auto wait = std::chrono::ceil<milliseconds>(wakes_at_.load() - Clock::now());
    const auto timeout_ms = std::clamp<int64_t>(wait.count(), 0, 60'000);
    num_events = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()),
                            static_cast<int>(timeout_ms));
  }
}

// False when the engine has been closed and nothing is left to do.
bool Engine::Turn(std::span<const epoll_event> events) {
  std::unique_lock lock(monitor_);
  for (const epoll_event& event : events) {
    if (event.data.ptr != nullptr) {
      static_cast<Pollable*>(event.data.ptr)->OnEvents(event.events);
    } else {
      eventfd_t count = 0;
      eventfd_read(wake_.get(), &count);
    }
  }
  RunCommands();
  progress_->Pass();
  Publish();
  const Time now = Clock::now();
  wakes_at_ = progress_->HasWork() ? now : std::min(progress_->NextTimer(), close_deadline_);
  const bool is_closing = close_deadline_ != Time::max();
  const bool goes_on = !is_closing || (now < close_deadline_ && !progress_->IsQuiet());
  std::vector<Completion> completions = progress_->TakeCompletions();
  lock.unlock();
  Complete(std::move(completions));
  return goes_on;
}

void Engine::Wake() {
  const std::lock_guard lock(inbox_mutex_);
  if (wake_) eventfd_write(wake_.get(), 1);
}

void Engine::Publish() {
  const std::lock_guard lock(failure_mutex_);
  if (failure_) return;
  failure_ = progress_->failure();
  if (failure_) failure_known_.notify_all();
}

std::shared_ptr<const Error> Engine::failure() const {
  CheckUsable();
  const std::lock_guard lock(failure_mutex_);
  return failure_;
}

std::shared_ptr<const Error> Engine::WaitFailure(milliseconds timeout) const {
  CheckUsable();
  std::unique_lock lock(failure_mutex_);
  failure_known_.wait_for(lock, timeout, [&] { return failure_ || closed_; });
  return failure_;
}

// A program may end while devices whose results it did not read still exchange, or before they do.
// The latter is not waited for as long: a rank may be in a branch without the exchange, and never
// start it. Another thread may close the engine meanwhile.
void Engine::WaitIdle(Time deadline) const {
  Time laggards_deadline = std::min(deadline, Clock::now() + kLaggardsTimeout);
  const auto is_idle = [&] {
    const std::lock_guard lock(monitor_);
    if (!progress_) return true;
    if (progress_->HasExchanges()) {
      laggards_deadline = std::min(deadline, Clock::now() + kLaggardsTimeout);
      return false;
    }
    return !progress_->HasLaggards() || Clock::now() >= laggards_deadline;
  };
  while (!failure() && Clock::now() < deadline && !is_idle()) {
    std::this_thread::sleep_for(milliseconds(1));
  }
}

void Engine::Close(milliseconds timeout) {
  CheckUsable();
  const Time deadline = Clock::now() + timeout;
  WaitIdle(deadline);
  if (!closed_ && !failure()) LogUnfinished();
  if (!closed_) CloseDevices(timeout);
  {
    const std::scoped_lock lock(inbox_mutex_, failure_mutex_);
    if (closed_.exchange(true)) return;
  }
  failure_known_.notify_all();
  if (progress_thread_.joinable()) {
    {
      const std::lock_guard lock(monitor_);
      RunCommands();  // earlier starts are under way
      progress_->SayGoodbye();
      close_deadline_ = deadline;
    }
    Wake();
    progress_thread_.join();
  }
  CloseCore();
  pool_.Close(deadline);
  std::shared_ptr<DeviceEngine> devices;
  {
    const std::lock_guard lock(devices_mutex_);
    devices.swap(devices_);
  }
  devices.reset();  // the devices' thread may need any of the locks
  const std::lock_guard lock(inbox_mutex_);
  inherited_fds_.clear();
  epoll_.Reset();
  wake_.Reset();
}

void Engine::LogUnfinished() {
  Unfinished unfinished = handles_.unfinished();
  if (const auto devices = FindDevices()) unfinished.merge(devices->unfinished());
  if (unfinished.empty()) return;
  const auto [plan, index] = *unfinished.begin();
  const std::string exchange = Read([&](const ProgressEngine& progress) {
    return progress.peers().plans().DescribeWithProgram(plan, index);
  });
  const size_t others = unfinished.size() - 1;
  LogLine(StrCat("jaxhet: ", exchange, " was started and never finished",
                 others > 0 ? StrCat(", as were ", others, " more") : "",
                 ": its data is lost, unless a checkpoint has the handle"));
}

// Nothing is added to the inbox any more. What other threads have left there is completed.
void Engine::CloseCore() {
  std::unique_lock lock(monitor_);
  RunCommands();
  std::vector<Completion> completions = progress_->TakeCompletions();
  progress_.reset();
  lock.unlock();
  Complete(std::move(completions));
}

void Engine::AbandonInChild() {
  keep_alive_ = shared_from_this();
  for (const int fd : inherited_fds_) close(fd);
}

void RegisterEngine(int64_t session, const std::shared_ptr<Engine>& engine) {
  Table& table = TheTable();
  const std::lock_guard lock(table.mutex);
  std::erase_if(table.engines, [](const auto& entry) { return entry.second.expired(); });
  if (!table.engines.try_emplace(session, engine).second) {
    Throw(ErrorCode::kUsage, "session ", session, " has an engine already");
  }
}

std::shared_ptr<Engine> FindEngine(int64_t session) {
  Table& table = TheTable();
  const std::lock_guard lock(table.mutex);
  const auto found = table.engines.find(session);
  std::shared_ptr<Engine> engine = found == table.engines.end() ? nullptr : found->second.lock();
  if (!engine) {
    Throw(ErrorCode::kUsage, "the program was compiled for session ", session,
          ", which has ended. Call it before jaxhet.shutdown().");
  }
  return engine;
}

}  // namespace jaxhet
