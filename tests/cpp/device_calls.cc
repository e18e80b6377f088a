#include "tests/cpp/device_calls.h"

#include <string>

namespace jaxhet::testing {

SimulatedOptions ZeroCopyOptions() {
  SimulatedOptions options;
  options.is_zero_copy = true;
  return options;
}

void ExpectCalls(SimulatedRanks& ranks, std::string_view expected, const Location& location) {
  const CalledAt here(location);
  const std::string calls = ranks.Calls();
  if (expected.starts_with('\n')) expected.remove_prefix(1);
  // In full beside the difference, so that they can be copied.
  EXPECT_EQ(calls, expected) << "the calls are\n" << calls;
}

void ExpectRight(SimulatedRanks& ranks, int64_t index, const Location& location) {
  const CalledAt here(location);
  EXPECT_TRUE(ranks.Run()) << "the streams do not end";
  EXPECT_TRUE(ranks.IsRight(0, index));
  EXPECT_TRUE(ranks.IsRight(1, index));
}

void StartBoth(SimulatedRanks& ranks, int64_t index, const SimulatedExchange& exchange) {
  for (const int rank : {1, 0}) {
    ranks.Calls();
    ranks.Start(rank, index, exchange);
  }
}

}  // namespace jaxhet::testing
