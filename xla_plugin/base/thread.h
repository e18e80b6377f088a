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

// Starts a thread that gets no signals: they are for the program's own threads. Throws DeviceError
// if the system has no thread left.
inline std::thread StartThread(const char* name, std::function<void()> body) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread;
  try {
    thread = std::thread(std::move(body));
  } catch (const std::system_error& error) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    Throw(ErrorCode::kDevice, "the thread ", name, " can't start (", error.what(),
          "); raise this process's limit of threads (ulimit -u, pids.max of its cgroup)");
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(thread.native_handle(), name);
  return thread;
}

}  // namespace jaxhet

#endif  // XLA_PLUGIN_BASE_THREAD_H_
