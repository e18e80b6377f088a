#ifndef XLA_PLUGIN_BASE_THREAD_H_
#define XLA_PLUGIN_BASE_THREAD_H_

#include <pthread.h>

#include <csignal>
#include <functional>
#include <system_error>
#include <thread>
#include <utility>

#include "xla_plugin/base/error.h"

namespace jaxhet {

// The calling thread gets no signals while it lives.
class SignalBlock {
 public:
  SignalBlock() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalBlock() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalBlock(const SignalBlock&) = delete;
  SignalBlock& operator=(const SignalBlock&) = delete;

 private:
  sigset_t before_{};
};

// Starts a thread that gets no signals: they are for the program's own threads. Throws DeviceError
// if the system has no thread left.
inline std::thread StartThread(const char* name, std::function<void()> body) {
  const SignalBlock block;  // which the new thread inherits
  try {
    std::thread thread(std::move(body));
    pthread_setname_np(thread.native_handle(), name);
    return thread;
  } catch (const std::system_error& error) {
    Throw(ErrorCode::kDevice, "the thread ", name, " can't start (", error.what(),
          "); raise this process's limit of threads (ulimit -u, pids.max of its cgroup)");
  }
}

}  // namespace jaxhet

#endif  // XLA_PLUGIN_BASE_THREAD_H_
