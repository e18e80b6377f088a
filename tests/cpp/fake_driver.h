#ifndef TESTS_CPP_FAKE_DRIVER_H_
#define TESTS_CPP_FAKE_DRIVER_H_

#include <string>
#include <string_view>
#include <vector>

// CUDA's driver and HIP's runtime for machines without a GPU: every entry point that we use,
// defined in the test program itself, does nothing but write down its arguments. Both have two
// devices.
namespace jaxhet::testing::fake_driver {

// Forgets all calls and failures; the next handle is 0x100, then 0x200, ...
void Reset();
// The next call of `function` returns `result`.
void FailNext(std::string_view function, int result);
// "cuMemcpyAsync(0x10, 0x20, 7, 0x3)", without those that only make a device current.
std::vector<std::string> Calls();
// CUDA's contexts that were pushed and not yet popped by this thread.
int ContextDepth();
// HIP's current device of this thread, and its last error.
int& CurrentDevice();
int& LastError();

}  // namespace jaxhet::testing::fake_driver

#endif  // TESTS_CPP_FAKE_DRIVER_H_
