#include "tests/softverbs/softverbs.h"

#include <unistd.h>

#include <array>
#include <cstdlib>
#include <string>

#include "xla_plugin/base/library.h"

namespace jaxhet::testing {
namespace {

constexpr std::array kPath = {SOFTVERBS_LIBRARY};  // path in the build folder

softverbs::Control& Load() {
  // Faults must not reach other tests.
  setenv("SOFTVERBS_FABRIC", std::to_string(getpid()).c_str(), /*overwrite=*/0);
  static const auto* const library = new Library(kPath);
  return *Function<decltype(softverbs_control)>(*library, "softverbs_control")();
}

}  // namespace

softverbs::Control& Softverbs() {
  static softverbs::Control& control = Load();
  return control;
}

}  // namespace jaxhet::testing
