#ifndef XLA_PLUGIN_BASE_ERROR_H_
#define XLA_PLUGIN_BASE_ERROR_H_

#include <array>
#include <cstdint>
#include <exception>
#include <string>
#include <string_view>

#include "xla_plugin/base/strings.h"

namespace jaxhet {

// The values travel between processes (FailInfo).
enum class ErrorCode : uint32_t { kUsage, kPlanMismatch, kPeer, kDeadline, kTransport, kDevice };

// Python's class names, indexed by ErrorCode.
inline constexpr std::array<std::string_view, 6> kErrorNames = {
    "UsageError",    "PlanMismatchError", "PeerError",
    "DeadlineError", "TransportError",    "DeviceError"};

// Thrown by set-up code and inside the engine, whose progress loop catches it and fails the engine.
// It never leaves the library through a C interface.
class Error : public std::exception {
 public:
  // `failed_process` is the process that failed, if one is known.
  Error(ErrorCode code, std::string_view text, int failed_process = -1);

  ErrorCode code() const { return code_; }
  int failed_process() const { return failed_process_; }
  std::string_view name() const { return kErrorNames.at(static_cast<size_t>(code_)); }
  // The message without the class name.
  std::string_view text() const { return std::string_view(what_).substr(text_offset_); }
  // "jaxhet.<name>: <text>".
  const char* what() const noexcept override { return what_.c_str(); }

 private:
  ErrorCode code_;
  int failed_process_;
  std::string what_;
  size_t text_offset_;
};

// Throws UsageError if `name` is not one of kErrorNames.
ErrorCode ErrorCodeOf(std::string_view name);

// The exception that is being handled, whatever it is, as an Error: ours as it is, std::bad_alloc
// as a DeviceError that says so, any other one as a DeviceError. Only for `catch` blocks at an
// outer interface, which nothing may cross.
Error CurrentError();

// "<call>: <strerror> (<number>)".
std::string ErrnoText(std::string_view call, int error_number);

template <typename... Args>
[[noreturn]] void Throw(ErrorCode code, const Args&... args) {
  throw Error(code, StrCat(args...));
}

// Throws a TransportError that names the system call and errno.
[[noreturn]] void ThrowErrno(std::string_view call);

// Severity of a line on stderr.
enum class Severity : uint8_t { kInfo, kWarning, kError };

// The least severity that a value of the option `log_level` lets through; errors always pass.
// Throws UsageError if there is no such value.
Severity LeastSeverity(std::string_view log_level);

// Writes one line on stderr, whole even when several processes write.
void LogLine(std::string_view line);

}  // namespace jaxhet

#endif  // XLA_PLUGIN_BASE_ERROR_H_
