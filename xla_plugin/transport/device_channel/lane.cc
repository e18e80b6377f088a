#include "xla_plugin/transport/device_channel/lane.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "xla_plugin/base/error.h"
#include "xla_plugin/base/thread.h"

namespace jaxhet {
namespace {

using std::chrono::microseconds;
using State = Lane::State;

// Turns of a thread that waits for a device: first without a pause, then with short pauses.
constexpr int kSpins = 200;
constexpr int kShortPauses = 2'000;
constexpr int kSpinsPerLook = 100;  // at events
constexpr microseconds kShortPause{20};
constexpr microseconds kLongPause{200};

}  // namespace

Transfer& Lane::Direction::Find(uint64_t chunk) {
  Throw(ErrorCode::kTransport, "the peer sent chunk ", chunk, " on a channel from here");
}

Lane::Lane(std::optional<Messages> messages, LogFunction log, const Open& open)
    : log_(std::move(log)) {
  if (messages) messages_.emplace(std::move(messages->fd), std::move(messages->keys));
  connection_ = open(*this);
}

void Lane::Accept(std::string_view offer) {
  connection_->Accept(offer);
  if (!connection_->HasMessages()) messages_.reset();
}

std::vector<Pollable*> Lane::Pollables() {
  std::vector<Pollable*> pollables = connection_->Pollables();
  if (messages_) pollables.push_back(messages_->socket());
  return pollables;
}

void Lane::TakeMessages() {
  if (!messages_ || !lost_.empty()) return;
  try {
    messages_->Flush();
    while (const auto message = messages_->Next()) {
      if (message->type != kMessage) {
        Throw(ErrorCode::kTransport, "the peer sent another message than the lane's");
      }
      connection_->OnMessage(std::as_bytes(std::span(message->body)));
    }
    const std::string& failure = messages_->socket()->send_failure();
    if (!failure.empty()) lost_ = StrCat("a lane's connection for messages: ", failure);
  } catch (const Error& error) {
    lost_ = error.text();
  }
}

Lane::State Lane::Advance() {
  const std::lock_guard lock(mutex_);
  if (is_over_) return State::kIdle;
  has_moved_ = is_stalled_ = false;
  TakeMessages();
  try {
    const State begun = outgoing_ == nullptr ? State::kIdle : outgoing_->Begin(*connection_);
    // Without messages nothing can be confirmed.
    const bool can_move = lost_.empty() || !messages_;
    const bool more = can_move && (connection_->Advance() || is_stalled_);
    const bool is_sending = outgoing_ != nullptr && outgoing_->is_sending();
    if (!lost_.empty() && (is_sending || connection_->HasBroken())) {
      Throw(ErrorCode::kTransport, lost_);
    }
    return has_moved_ ? State::kMoved : std::max(begun, more ? State::kWaiting : State::kIdle);
  } catch (const Error& error) {
    is_over_ = true;
    for (Direction* const direction : {outgoing_, incoming_}) {
      if (direction != nullptr) direction->Fail(error);
    }
    return State::kIdle;
  }
}

void Lane::SetOutgoing(Direction& direction) {
  const std::lock_guard lock(mutex_);
  outgoing_ = &direction;
}

void Lane::SetIncoming(Direction& direction) {
  {
    const std::lock_guard lock(mutex_);
    incoming_ = &direction;
  }
  Wake();  // chunks may have arrived
}

void Lane::Stop() {
  const std::lock_guard lock(mutex_);
  is_over_ = true;
  connection_->Kill();
}

bool Lane::IsReady(uint64_t ticket) {
  const bool is_ready = incoming_ != nullptr && incoming_->IsReady(ticket);
  is_stalled_ |= !is_ready;
  return is_ready;
}

void Lane::Sent(Transfer& transfer, size_t num_bytes) {
  transfer.sent += num_bytes;
  has_moved_ = true;
  outgoing_->Moved(transfer);
}

void Lane::Received(Transfer& transfer, size_t num_bytes) {
  transfer.received += num_bytes;
  has_moved_ = true;
  incoming_->Moved(transfer);
}

class ProxyThread {
 public:
  // `ready` is a descriptor that is always ready.
  explicit ProxyThread(const Fd& ready) : epoll_(epoll_create1(EPOLL_CLOEXEC)), ready_(ready) {
    epoll_event event{.events = 0, .data = {.ptr = nullptr}};
    if (!epoll_ || epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, ready_.get(), &event) != 0) {
      ThrowErrno("epoll_create1, epoll_ctl");
    }
    thread_ = StartThread("jaxhet-proxy", [this] { Run(); });
  }
  ~ProxyThread() {
    stopping_ = true;
    Wake();
    thread_.join();
  }
  ProxyThread(const ProxyThread&) = delete;
  ProxyThread& operator=(const ProxyThread&) = delete;

  void Add(Lane& lane) {
    {
      const std::lock_guard lock(mutex_);
      for (Pollable* const pollable : lane.Pollables()) Watch(pollable, lane);
      added_.push_back(&lane);
    }
    has_added_ = true;
    Wake();
  }

  // No work is missed: the caller has written its work before, and the thread looks for work once
  // more after it has set `is_asleep_`. Changing the ready descriptor's events ends one
  // epoll_wait().
  void Wake() {
    epoll_event event{.events = EPOLLIN | EPOLLONESHOT, .data = {.ptr = nullptr}};
    if (is_asleep_.exchange(false)) epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, ready_.get(), &event);
  }

 private:
  void Watch(Pollable* pollable, Lane& lane) {
    std::vector<Lane*>& lanes = watched_[pollable];
    lanes.push_back(&lane);
    if (lanes.size() > 1) return;
    epoll_event event{.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET,
                      .data = {.ptr = pollable}};
    if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, pollable->fd(), &event) != 0) {
      ThrowErrno("epoll_ctl");
    }
  }

  void Run() {
    int turns = 0;  // since something has moved
    while (!stopping_) {
      const State state = Turn();
      turns = state == State::kWaiting ? turns + 1 : 0;
      if (state == State::kIdle) {
        Sleep(std::nullopt);
      } else if (turns > kSpins) {
        Sleep(turns > kSpins + kShortPauses ? kLongPause : kShortPause);
      } else if (turns % kSpinsPerLook == 0) {
        TakeEvents(0);
      }
    }
  }

  State Turn() {
    if (has_added_.exchange(false)) {
      const std::lock_guard lock(mutex_);
      std::ranges::copy(std::exchange(added_, {}), std::back_inserter(lanes_));
    }
    State state = State::kIdle;
    for (Lane* const lane : lanes_) {
      if (!lane->is_due_ || !lane->is_due_.exchange(false)) continue;
      const State reached = lane->Advance();
      if (reached != State::kIdle) lane->is_due_ = true;
      state = std::max(state, reached);
    }
    return state;
  }

  // Waits for an event or Wake(), for at most so long; none: without a limit.
  void Sleep(std::optional<microseconds> most) {
    is_asleep_ = true;
    const auto is_due = [](const Lane* lane) { return lane->is_due_.load(); };
    if (stopping_ || has_added_ || (!most && std::ranges::any_of(lanes_, is_due))) {
      is_asleep_ = false;
    } else if (most) {
      const timespec limit{.tv_sec = 0, .tv_nsec = 1'000 * most->count()};
      pollfd polled{.fd = epoll_.get(), .events = POLLIN, .revents = 0};
      const int count = ppoll(&polled, 1, &limit, nullptr);
      is_asleep_ = false;
      if (count > 0) TakeEvents(0);
    } else {
      TakeEvents(-1);
      is_asleep_ = false;
    }
  }

  void TakeEvents(int timeout_ms) {
    std::array<epoll_event, 64> events{};
    const int count =
        epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), timeout_ms);
    if (count <= 0) return;
    const std::lock_guard lock(mutex_);
    for (int i = 0; i < count; ++i) {
      const epoll_event& event = events[static_cast<size_t>(i)];
      auto* const pollable = static_cast<Pollable*>(event.data.ptr);
      if (pollable == nullptr) continue;  // the event of Wake()
      pollable->OnEvents(event.events);
      for (Lane* const lane : watched_.at(pollable)) lane->is_due_ = true;
    }
  }

  Fd epoll_;
  const Fd& ready_;
  std::atomic<bool> stopping_ = false;
  std::atomic<bool> is_asleep_ = false;
  std::atomic<bool> has_added_ = false;
  std::vector<Lane*> lanes_;  // the thread's
  std::mutex mutex_;
  std::vector<Lane*> added_;                         // under mutex_
  std::map<Pollable*, std::vector<Lane*>> watched_;  // under mutex_; lanes may share pollables
  std::thread thread_;
};

void Lane::Wake() {
  is_due_ = true;
  if (ProxyThread* const thread = thread_) thread->Wake();
}

Proxy::Proxy() = default;
Proxy::~Proxy() = default;

void Proxy::Add(Lane& lane, size_t wanted_threads) {
  const std::lock_guard lock(mutex_);
  if (lane.thread_ != nullptr) return;
  if (!ready_) ready_ = Fd(eventfd(1, EFD_CLOEXEC));
  if (!ready_) ThrowErrno("eventfd");
  if (num_lanes_ >= threads_.size() && threads_.size() < std::min(wanted_threads, kMostThreads)) {
    threads_.push_back(std::make_unique<ProxyThread>(ready_));
  }
  ProxyThread& thread = *threads_[num_lanes_++ % threads_.size()];
  lane.thread_ = &thread;
  thread.Add(lane);
}

}  // namespace jaxhet
