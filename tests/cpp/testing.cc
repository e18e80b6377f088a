#include "tests/cpp/testing.h"

#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <exception>
#include <mutex>
#include <utility>
#include <vector>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"
#include "xla_plugin/base/strings.h"

namespace jaxhet::testing {
namespace {

struct TestCase {
  std::string name;
  std::function<void()> body;
};

std::vector<TestCase>& Tests() {
  static auto* const tests = new std::vector<TestCase>;
  return *tests;
}

// Failures in order. Several threads of a test may add to it.
class Failures {
 public:
  void Add(std::string text) {
    const std::scoped_lock lock(mutex_);
    texts_.push_back(std::move(text));
  }
  std::vector<std::string> texts() const {
    const std::scoped_lock lock(mutex_);
    return texts_;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> texts_;
};

Failures& AllFailures() {
  static auto* const failures = new Failures;
  return *failures;
}

void RunTest(const TestCase& test) {
  std::fprintf(stderr, "[ run  ] %s\n", test.name.c_str());
  const auto begin = std::chrono::steady_clock::now();
  const size_t before = AllFailures().texts().size();
  try {
    test.body();
  } catch (const std::exception& error) {
    AddFailure(error.what(), Location::current());
  }
  const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - begin;
  const bool has_failed = AllFailures().texts().size() > before;
  std::fprintf(stderr, "[ %s ] %s (%.0f ms)\n", has_failed ? "FAIL" : " ok ", test.name.c_str(),
               time.count());
  if (has_failed) AllFailures().Add(StrCat("  in ", test.name));
}

}  // namespace

bool AddTest(std::string name, std::function<void()> body) {
  Tests().push_back({std::move(name), std::move(body)});
  return true;
}

void AddFailure(std::string_view text, const Location& location) {
  std::string line = StrCat(location.file_name(), ":", location.line(), ": ", text);
  std::fprintf(stderr, "%s\n", line.c_str());
  AllFailures().Add(std::move(line));
}

void ExpectContains(std::string_view text, std::string_view part, const Location& location) {
  if (text.find(part) != std::string_view::npos) return;
  AddFailure(StrCat("'", part, "' is not in '", text, "'"), location);
}

CapturedStderr::CapturedStderr()
    : before_(dup(STDERR_FILENO)), file_(memfd_create("stderr", MFD_CLOEXEC)) {
  dup2(file_.get(), STDERR_FILENO);
}

CapturedStderr::~CapturedStderr() { dup2(before_.get(), STDERR_FILENO); }

std::string CapturedStderr::Text() const {
  std::string text(CheckedCast<size_t>(lseek(file_.get(), 0, SEEK_END)), '\0');
  const ssize_t num_bytes = pread(file_.get(), text.data(), text.size(), 0);
  if (num_bytes < 0) ThrowErrno("pread");
  text.resize(CheckedCast<size_t>(num_bytes));
  return text;
}

std::string ExpectThrow(const std::function<void()>& function, const Location& location) {
  try {
    function();
  } catch (const std::exception& error) {
    return error.what();
  }
  AddFailure("nothing was thrown", location);
  return {};
}

}  // namespace jaxhet::testing

int main(int argc, char** argv) {  // NOLINT(misc-const-correctness)
  const std::string_view pattern = argc > 1 ? argv[1] : "";
  for (const auto& test : jaxhet::testing::Tests()) {
    if (test.name.find(pattern) != std::string::npos) jaxhet::testing::RunTest(test);
  }
  // Once more: what a test logs hides them.
  const auto failures = jaxhet::testing::AllFailures().texts();
  for (const std::string& text : failures) std::fprintf(stderr, "failed: %s\n", text.c_str());
  return failures.empty() ? 0 : 1;
}
