#ifndef XLA_PLUGIN_ENGINE_HOST_COMPLETION_POOL_H_
#define XLA_PLUGIN_ENGINE_HOST_COMPLETION_POOL_H_

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "xla_plugin/engine/common/exchange.h"

namespace jaxhet {

// Threads that run callbacks. A callback runs the rest of an XLA program and may block there, so a
// new thread starts whenever none is free: no callback waits for another one.
class CompletionPool {
 public:
  CompletionPool();
  ~CompletionPool();
  CompletionPool(const CompletionPool&) = delete;
  CompletionPool& operator=(const CompletionPool&) = delete;

  // May be called after Close(), too. If no thread can start, the caller's runs the callback.
  void Run(std::function<void()> callback);
  // Runs what is queued and joins the threads. Those that are still busy at `deadline` are left to
  // end on their own.
  void Close(Time deadline);

 private:
  struct State;  // shared with threads that may outlive the pool

  static void Work(State& state);
  bool AddThread();  // under the state's mutex; false if the system has none left

  std::shared_ptr<State> state_;
  std::vector<std::thread> threads_;  // under the state's mutex
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_ENGINE_HOST_COMPLETION_POOL_H_
