#include "tests/cpp/testing.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define JAXHET_IS_SANITIZED
#include <sanitizer/common_interface_defs.h>
#endif

#include <chrono>
#include <csignal>
#include <cstdint>
#include <ctime>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <thread>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"

namespace jaxhet::testing {
namespace {

// Where a sanitizer writes what it finds.
void ReportTo([[maybe_unused]] int fd) {
#ifdef JAXHET_IS_SANITIZED
  __sanitizer_set_report_fd(reinterpret_cast<void*>(intptr_t{fd}));
#endif
}

// wchan is where a thread waits in the kernel.
constexpr const char* kPrintThreads = R"sh(
echo "process $PPID hangs; its threads:"
gdb -p "$PPID" -batch -ex "thread apply all backtrace" 2>&1 && exit
for thread in "/proc/$PPID/task"/*; do
  echo "$(cat "$thread/comm"): waits in $(cat "$thread/wchan"), system call $(cat "$thread/syscall")"
done)sh";

// Allocates nothing: the hang may be in the allocator.
void PrintThreadsAndEnd(int alarm_signal) {
  const pid_t printer = _Fork();
  if (printer == 0) {
    execl("/bin/sh", "sh", "-c", kPrintThreads, nullptr);
    _exit(1);
  }
  waitpid(printer, nullptr, 0);
  std::signal(alarm_signal, SIG_DFL);
  std::raise(alarm_signal);
}

[[maybe_unused]] const auto previous_handler = std::signal(SIGALRM, PrintThreadsAndEnd);

int32_t CountEntries(const char* path) {
  return CheckedCast<int32_t>(std::distance(std::filesystem::directory_iterator(path), {}));
}

int CodeOf(const std::function<int()>& body) {
  const bool had_failed = ::testing::Test::HasFailure();
  try {
    const int code = body();
    return ::testing::Test::HasFailure() && !had_failed ? kChildFailed : code;
  } catch (const std::exception& error) {
    ADD_FAILURE() << "an exception in a child process: " << error.what();
    return kChildFailed;
  }
}

}  // namespace

std::string ThrownText(const std::function<void()>& function, const Location& location) {
  try {
    function();
  } catch (const Error& error) {
    return error.what();
  }
  ADD_FAILURE_AT(location.file_name(), static_cast<int>(location.line())) << "nothing was thrown";
  return {};
}

pid_t StartChild(const std::function<int()>& body) {
  const pid_t child = fork();
  if (child < 0) ThrowErrno("fork");
  if (child > 0) return child;
  alarm(kChildSeconds);
  _exit(CodeOf(body));
}

int WaitForChild(pid_t child) {
  int status = 0;
  if (waitpid(child, &status, 0) != child) ThrowErrno("waitpid");
  const int code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  EXPECT_NE(code, kChildFailed) << "of a child process; its output says why";
  if (WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM) {
    ADD_FAILURE() << "child process " << child << " hung; its output has its threads";
  }
  return code;
}

int32_t CountFds() { return CountEntries("/proc/self/fd"); }
int32_t CountThreads() { return CountEntries("/proc/self/task"); }

int32_t CountMappings() {
  std::ifstream maps("/proc/self/maps");
  int32_t count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += line.find("memfd:jaxhet") != std::string::npos ? 1 : 0;
  }
  return count;
}

int64_t IdleCpuMs() {
  const clock_t begin = clock();
  std::this_thread::sleep_for(std::chrono::milliseconds(400));
  return (clock() - begin) * 1'000 / CLOCKS_PER_SEC;
}

CapturedStderr::CapturedStderr()
    : before_(dup(STDERR_FILENO)), file_(memfd_create("stderr", MFD_CLOEXEC)) {
  dup2(file_.get(), STDERR_FILENO);
  ReportTo(before_.get());
}

CapturedStderr::~CapturedStderr() {
  dup2(before_.get(), STDERR_FILENO);
  ReportTo(STDERR_FILENO);
}

std::string CapturedStderr::Text() const {
  std::string text(CheckedCast<size_t>(lseek(file_.get(), 0, SEEK_END)), '\0');
  const ssize_t num_bytes = pread(file_.get(), text.data(), text.size(), 0);
  if (num_bytes < 0) ThrowErrno("pread");
  text.resize(CheckedCast<size_t>(num_bytes));
  return text;
}

}  // namespace jaxhet::testing
