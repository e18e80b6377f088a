#include "xla_plugin/engine/host/completion_pool.h"

#ifdef __x86_64__
#include <xmmintrin.h>
#endif

#include <utility>

#include "xla_plugin/base/thread.h"

namespace jaxhet {
namespace {

// Makes the calling thread compute with zeros for denormals, as XLA's own threads do. A thread that
// runs a part of a program must agree with them, or ranks differ in bits by who ran what.
void FlushDenormals() {
#ifdef __x86_64__
  constexpr unsigned kFlushToZero = 0x8000;
  constexpr unsigned kDenormalsAreZero = 0x0040;
  _mm_setcsr(_mm_getcsr() | kFlushToZero | kDenormalsAreZero);
#elif defined(__aarch64__)
  constexpr unsigned long kFlushToZero = 1UL << 24;
  unsigned long fpcr = 0;
  asm volatile("mrs %0, fpcr" : "=r"(fpcr));
  asm volatile("msr fpcr, %0" ::"r"(fpcr | kFlushToZero));
#endif
}

}  // namespace

struct CompletionPool::State {
  std::mutex mutex;
  std::condition_variable work;   // a callback is queued, or the pool closes
  std::condition_variable ended;  // a thread has ended
  std::deque<std::function<void()>> queue;
  size_t idle = 0;
  size_t running = 0;  // threads that have not ended
  bool closing = false;
};

CompletionPool::CompletionPool() : state_(std::make_shared<State>()) {}

CompletionPool::~CompletionPool() { Close(Clock::now()); }

void CompletionPool::Run(std::function<void()> callback) {
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->idle > state_->queue.size() || AddThread()) {
      state_->queue.push_back(std::move(callback));
      callback = nullptr;
    }
  }
  if (callback) return callback();
  state_->work.notify_one();
}

bool CompletionPool::AddThread() {
  try {
    threads_.push_back(StartThread("jaxhet-done", [state = state_] { Work(*state); }));
  } catch (const Error& error) {
    LogLine(StrCat("jaxhet: ", error.text()));
    return false;
  }
  ++state_->running;
  return true;
}

void CompletionPool::Work(State& state) {
  FlushDenormals();
  std::unique_lock lock(state.mutex);
  while (true) {
    ++state.idle;
    state.work.wait(lock, [&] { return state.closing || !state.queue.empty(); });
    --state.idle;
    if (state.queue.empty()) break;
    std::function<void()> callback = std::move(state.queue.front());
    state.queue.pop_front();
    lock.unlock();
    callback();
    callback = nullptr;
    lock.lock();
  }
  --state.running;
  state.ended.notify_all();
}

void CompletionPool::Close(Time deadline) {
  std::unique_lock lock(state_->mutex);
  state_->closing = true;
  state_->work.notify_all();
  const bool all_ended =
      state_->ended.wait_until(lock, deadline, [&] { return state_->running == 0; });
  std::vector<std::thread> threads = std::exchange(threads_, {});
  lock.unlock();
  for (std::thread& thread : threads) {
    if (all_ended) {
      thread.join();
    } else {
      thread.detach();
    }
  }
}

}  // namespace jaxhet
