#include "tests/softverbs/softverbs.h"

#include <unistd.h>

#include <array>
#include <cstdlib>
#include <string>

#include "tests/softverbs/library/control.h"
#include "xla_plugin/base/error.h"
#include "xla_plugin/base/library.h"

namespace jaxhet::testing {
namespace {

constexpr std::array kPath = {SOFTVERBS_LIBRARY};  // path in the build folder

}  // namespace

const Softverbs& Softverbs::Get() {
  static const auto* const softverbs = new Softverbs;
  return *softverbs;
}

// A command for all processes must not reach other tests.
Softverbs::Softverbs() : library_(kPath) {
  setenv("SOFTVERBS_FABRIC", std::to_string(getpid()).c_str(), /*overwrite=*/0);
}

void Softverbs::Command(std::string_view text) const {
  const Function<decltype(softverbs_command)> command(library_, "softverbs_command");
  std::array<char, 256> problem{};
  if (command(std::string(text).c_str(), problem.data(), problem.size()) != 0) {
    Throw(ErrorCode::kUsage, problem.data());
  }
}

void Softverbs::SetCopy(void (*copy)(void* to, const void* from, size_t num_bytes)) const {
  const Function<decltype(softverbs_set_copy)> set_copy(library_, "softverbs_set_copy");
  set_copy(copy);
}

std::string Softverbs::Query(const char* what) const {
  const Function<decltype(softverbs_query)> query(library_, "softverbs_query");
  std::array<char, 4096> text{};
  query(what, text.data(), text.size());
  return text.data();
}

}  // namespace jaxhet::testing
