#ifndef TESTS_CPP_DEVICE_CALLS_H_
#define TESTS_CPP_DEVICE_CALLS_H_

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "tests/cpp/simulated_ranks.h"
#include "tests/cpp/testing.h"

// Expectations on the driver calls of simulated ranks.
namespace jaxhet::testing {

inline constexpr size_t kLongBytes = 2'500;  // three slots

SimulatedOptions ZeroCopyOptions();

// The calls since the last look are `expected`, which may begin with an empty line.
void ExpectCalls(SimulatedRanks& ranks, std::string_view expected,
                 const Location& location = Location::current());

// All streams end, and both ranks have the result.
void ExpectRight(SimulatedRanks& ranks, int64_t index,
                 const Location& location = Location::current());

// Starts on both ranks. Calls() then has the calls of rank 0 only.
void StartBoth(SimulatedRanks& ranks, int64_t index, const SimulatedExchange& exchange);

}  // namespace jaxhet::testing

#endif  // TESTS_CPP_DEVICE_CALLS_H_
