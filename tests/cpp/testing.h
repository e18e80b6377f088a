#ifndef TESTS_CPP_TESTING_H_
#define TESTS_CPP_TESTING_H_

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <source_location>
#include <string>

#include "xla_plugin/base/fd.h"

// GoogleTest, and what it does not have.
namespace jaxhet::testing {

using Location = std::source_location;

// ThreadSanitizer makes programs ten times slower. Sizes of data find no races that others don't.
#ifdef __SANITIZE_THREAD__
inline constexpr bool kIsThreadSanitized = true;
#else
inline constexpr bool kIsThreadSanitized = false;
#endif

// Adds the line that called a helper to the failures of the helper's expectations, in this thread
// and while it lives.
class CalledAt {
 public:
  explicit CalledAt(const Location& location)
      : trace_(location.file_name(), static_cast<int>(location.line()), "called here") {}

 private:
  ::testing::ScopedTrace trace_;
};

// Text of the Error that `function` throws; a failure if it throws none. The compiler needs half
// the time that it needs for a ThrowsMessage matcher of each lambda.
std::string ThrownText(const std::function<void()>& function,
                       const Location& location = Location::current());

// Exit code of a child process in which an expectation failed or an exception was thrown.
inline constexpr int kChildFailed = 99;

// A child that lives longer hangs.
inline constexpr unsigned kChildSeconds = kIsThreadSanitized ? 180 : 60;

// Forks. The child runs `body` and ends by _exit with what it returns, or with kChildFailed: it
// never returns into GoogleTest, whose tests are its parent's. SIGALRM ends a child that hangs.
//
// In every test program SIGALRM prints the stacks of all threads, if gdb is installed, or else the
// system calls that they wait in. Then it ends the process. ctest sends it to tests that hang.
pid_t StartChild(const std::function<int()>& body);

// Exit code of a child, after its end; -1 if a signal ended it. kChildFailed and a child that hung
// are failures here.
int WaitForChild(pid_t child);

// Open file descriptors of this process; those that the count itself opens are counted, too.
int32_t CountFds();
int32_t CountThreads();
// Mappings of the engine's shared memory in this process.
int32_t CountMappings();
// Milliseconds of CPU time that this process uses within 400 ms.
int64_t IdleCpuMs();

// Holds back what is written on stderr while it lives, except the reports of sanitizers, which end
// the process.
class CapturedStderr {
 public:
  CapturedStderr();
  ~CapturedStderr();
  CapturedStderr(const CapturedStderr&) = delete;
  CapturedStderr& operator=(const CapturedStderr&) = delete;

  std::string Text() const;

 private:
  Fd before_;
  Fd file_;
};

}  // namespace jaxhet::testing

#endif  // TESTS_CPP_TESTING_H_
