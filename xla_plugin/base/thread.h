#ifndef XLA_PLUGIN_BASE_THREAD_H_
#define XLA_PLUGIN_BASE_THREAD_H_

#include <pthread.h>

#include <csignal>
#include <functional>
#include <thread>
#include <utility>

namespace jaxhet {

// Starts a thread that gets no signals: they are for the program's own threads.
inline std::thread StartThread(const char* name, std::function<void()> body) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread(std::move(body));
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(thread.native_handle(), name);
  return thread;
}

}  // namespace jaxhet

#endif  // XLA_PLUGIN_BASE_THREAD_H_
