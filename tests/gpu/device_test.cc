// The device layer on a real GPU. Each test is a process of its own, and some start a second one,
// which may see another GPU; run.sh runs them all.
//
//   gpu_device_test VENDOR LIBRARY list      the tests' names
//   gpu_device_test VENDOR LIBRARY devices   the number of devices, or why there are none
//   gpu_device_test VENDOR LIBRARY TEST [PEER_VISIBLE]
//                                            the last line is "ok", "skip: ..." or "FAIL: ..."

#include <dlfcn.h>

#include <cstdio>
#include <sstream>
#include <string>

#include "tests/gpu/device_testing.h"

namespace jaxhet::testing {
namespace {

// A line "calls <entry point> <number>" for each of the HIP double's.
void PrintCalls(const std::string& library) {
  void* const handle = dlopen(library.c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (handle == nullptr) return;
  const auto calls = reinterpret_cast<size_t (*)(char*, size_t)>(dlsym(handle, "hipDoubleCalls"));
  if (calls == nullptr) return;
  std::string text(calls(nullptr, 0) + 1, '\0');
  calls(text.data(), text.size());
  std::istringstream lines(text.c_str());  // without the closing NUL
  for (std::string line; std::getline(lines, line);) std::printf("calls %s\n", line.c_str());
}

int Run(const Setup& setup) {
  Tests tests = OneProcessTests();
  tests.merge(TwoProcessTests());
  if (setup.test == "list") {
    for (const auto& [name, test] : tests) {
      if (!name.ends_with("-peer")) std::printf("%s\n", name.c_str());
    }
    return 0;
  }
  if (setup.test == "devices") {
    std::printf("%zu\n", setup.List().size());
    return 0;
  }
  tests.at(setup.test)(setup);
  PrintCalls(setup.library);
  if (!setup.test.ends_with("-peer")) std::printf("ok\n");
  return 0;
}

}  // namespace
}  // namespace jaxhet::testing

int main(int argc, char** argv) {  // NOLINT(misc-const-correctness)
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  try {
    if (argc < 4) jaxhet::Throw(jaxhet::ErrorCode::kUsage, "VENDOR LIBRARY TEST [PEER_VISIBLE]");
    return jaxhet::testing::Run({argv[1], argv[2], argv[3], argc > 4 ? argv[4] : ""});
  } catch (const jaxhet::testing::Skip& skip) {
    std::printf("skip: %s\n", skip.what());
    return 0;
  } catch (const std::exception& error) {
    std::printf("FAIL: %s\n", error.what());
    return 1;
  }
}
