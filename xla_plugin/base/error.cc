#include "xla_plugin/base/error.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <system_error>

namespace jaxhet {

Error::Error(ErrorCode code, std::string_view text, int failed_process)
    : code_(code), failed_process_(failed_process) {
  what_ = StrCat("jaxhet.", name(), ": ");
  text_offset_ = what_.size();
  what_ += text;
}

ErrorCode ErrorCodeOf(std::string_view name) {
  const auto* found = std::ranges::find(kErrorNames, name);
  if (found == kErrorNames.end()) Throw(ErrorCode::kUsage, "no error is called '", name, "'");
  return static_cast<ErrorCode>(found - kErrorNames.begin());
}

Error CurrentError() {
  try {
    throw;
  } catch (const Error& error) {
    return error;
  } catch (const std::bad_alloc&) {
    return {ErrorCode::kDevice, "this process has no host memory left (std::bad_alloc)"};
  } catch (const std::exception& error) {
    return {ErrorCode::kDevice, error.what()};
  } catch (...) {
    return {ErrorCode::kDevice, "an exception that is no std::exception; please report this"};
  }
}

std::string ErrnoText(std::string_view call, int error_number) {
  return StrCat(call, ": ", std::generic_category().message(error_number), " (", error_number, ")");
}

void ThrowErrno(std::string_view call) {
  const int error_number = errno;
  throw Error(ErrorCode::kTransport, ErrnoText(call, error_number));
}

Severity LeastSeverity(std::string_view log_level) {
  if (log_level == "info") return Severity::kInfo;
  if (log_level == "warning") return Severity::kWarning;
  if (log_level == "error" || log_level == "critical") return Severity::kError;
  Throw(ErrorCode::kUsage, "log_level takes info, warning, error, critical, not '", log_level, "'");
}

void LogLine(std::string_view line) {
  const std::string text = StrCat(line, "\n");
  // Best effort: there is nobody left to tell.
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, text.data(), text.size());
}

}  // namespace jaxhet
