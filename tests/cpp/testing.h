#ifndef TESTS_CPP_TESTING_H_
#define TESTS_CPP_TESTING_H_

#include <functional>
#include <source_location>
#include <sstream>
#include <string>
#include <string_view>

#include "xla_plugin/base/fd.h"

// A test framework in one page: the tests then build wherever the engine does, with CMake and
// Bazel, without root and without the network. A program of tests runs those whose names contain
// its argument, or all.
namespace jaxhet::testing {

using Location = std::source_location;

// ThreadSanitizer makes programs ten times slower. Sizes of data find no races that others don't.
#ifdef __SANITIZE_THREAD__
inline constexpr bool kIsThreadSanitized = true;
#else
inline constexpr bool kIsThreadSanitized = false;
#endif

bool AddTest(std::string name, std::function<void()> body);
void AddFailure(std::string_view text, const Location& location);

#define TEST(name)                                                                              \
  static void name();                                                                           \
  [[maybe_unused]] static const bool added_##name = ::jaxhet::testing::AddTest(#name, &(name)); \
  static void name()

inline void ExpectTrue(bool condition, std::string_view text,
                       const Location& location = Location::current()) {
  if (!condition) AddFailure(text, location);
}
#define EXPECT(...) ::jaxhet::testing::ExpectTrue((__VA_ARGS__), #__VA_ARGS__)

template <typename A, typename B>
void ExpectEqual(const A& actual, const B& expected,
                 const Location& location = Location::current()) {
  if (actual == expected) return;
  std::ostringstream text;
  text << "got " << actual << ", expected " << expected;
  AddFailure(text.str(), location);
}

void ExpectContains(std::string_view text, std::string_view part,
                    const Location& location = Location::current());

// Holds back what is written on stderr while it lives.
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

// The text of the exception that `function` throws; a failure if it throws none.
std::string ExpectThrow(const std::function<void()>& function,
                        const Location& location = Location::current());

}  // namespace jaxhet::testing

#endif  // TESTS_CPP_TESTING_H_
