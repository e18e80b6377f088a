#include "tests/cpp/testing.h"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <exception>
#include <utility>
#include <vector>

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

std::atomic<int> failures = 0;  // tests run threads

void Run(const TestCase& test) {
  std::fprintf(stderr, "[ run  ] %s\n", test.name.c_str());
  const auto begin = std::chrono::steady_clock::now();
  const int before = failures;
  try {
    test.body();
  } catch (const std::exception& error) {
    AddFailure(error.what(), Location::current());
  }
  const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - begin;
  std::fprintf(stderr, "[ %s ] %s (%.0f ms)\n", failures == before ? " ok " : "FAIL",
               test.name.c_str(), time.count());
}

}  // namespace

bool AddTest(std::string name, std::function<void()> body) {
  Tests().push_back({std::move(name), std::move(body)});
  return true;
}

void AddFailure(std::string_view text, const Location& location) {
  ++failures;
  std::fprintf(stderr, "%s:%u: %.*s\n", location.file_name(), location.line(),
               static_cast<int>(text.size()), text.data());
}

void ExpectContains(std::string_view text, std::string_view part, const Location& location) {
  if (text.find(part) != std::string_view::npos) return;
  AddFailure(StrCat("'", part, "' is not in '", text, "'"), location);
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
    if (test.name.find(pattern) != std::string::npos) jaxhet::testing::Run(test);
  }
  return jaxhet::testing::failures == 0 ? 0 : 1;
}
