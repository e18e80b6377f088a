#include <array>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string_view>

#include "tests/cpp/testing.h"
#include "xla_plugin/engine/registry.h"

// The handlers of XLA's FFI, called without XLA, where the engine can't be found: every exception
// is an error that they return. One that crossed XLA's C interface would end the process.
namespace jaxhet {

// NOLINTNEXTLINE(misc-use-internal-linkage): the files below call it in this namespace
std::shared_ptr<Engine> ThrowAsSessionSays(int64_t session);

}  // namespace jaxhet

#define FindEngine ThrowAsSessionSays
#include "xla_plugin/ffi/device_exchange.cc"  // NOLINT(bugprone-suspicious-include)
#include "xla_plugin/ffi/exchange.cc"         // NOLINT(bugprone-suspicious-include)
#undef FindEngine

namespace jaxhet {

std::shared_ptr<Engine> ThrowAsSessionSays(int64_t session) {
  if (session == 0) Throw(ErrorCode::kPeer, "process 3 is gone");
  if (session == 1) throw std::length_error("too long");
  if (session == 2) throw std::bad_alloc();
  throw 7;  // NOLINT(hicpp-exception-baseclass,bugprone-std-exception-baseclass)
}

namespace testing {
namespace {

using ::testing::HasSubstr;

struct Case {
  xla::ffi::ErrorCode code;
  std::string_view words;
};
constexpr std::array kCases = {
    Case{xla::ffi::ErrorCode::kUnavailable, "jaxhet.PeerError: process 3 is gone"},
    Case{xla::ffi::ErrorCode::kInternal, "jaxhet.DeviceError: too long"},
    Case{xla::ffi::ErrorCode::kInternal, "jaxhet.DeviceError: this process has no host memory"},
    Case{xla::ffi::ErrorCode::kInternal, "jaxhet.DeviceError: an exception that is no std::"}};

// `call` returns the error of a handler for a session.
template <typename Call>
void ExpectErrors(Call call, const Location& location = Location::current()) {
  const CalledAt here(location);
  for (size_t session = 0; session < kCases.size(); ++session) {
    const xla::ffi::Error error = call(static_cast<int64_t>(session));
    EXPECT_EQ(error.errc(), kCases.at(session).code);
    EXPECT_THAT(error.message(), HasSubstr(kCases.at(session).words));
  }
}

constexpr xla::ffi::Span<const int64_t> kNoRanks;

// A buffer of no bytes.
struct Empty {
  XLA_FFI_Buffer raw{};
  xla::ffi::AnyBuffer buffer{&raw};
  xla::ffi::Result<xla::ffi::AnyBuffer> result{buffer};
};

TEST(FfiTest, StartOnAGpuReturnsEveryExceptionAsAnError) {
  ExpectErrors([](int64_t session) {
    const Empty empty;
    return Start({}, 0, session, 0, 0, 0, kNoRanks, 1, 0, 0, 0, empty.buffer, empty.result);
  });
}

TEST(FfiTest, DoneOnAGpuReturnsEveryExceptionAsAnError) {
  ExpectErrors([](int64_t session) {
    const Empty empty;
    return Done({}, 0, session, 0, 0, 0, kNoRanks, 1, 0, 0, 0, empty.buffer, empty.buffer,
                empty.result);
  });
}

TEST(FfiTest, PartOnAGpuReturnsEveryExceptionAsAnError) {
  ExpectErrors([](int64_t session) {
    const Empty empty;
    return Part({}, 0, session, 0, 0, 0, kNoRanks, 1, 0, 0, 0, empty.buffer, empty.buffer,
                empty.result, empty.result);
  });
}

TEST(FfiTest, ExchangeOnACpuReturnsEveryExceptionAsAnError) {
  ExpectErrors([](int64_t session) {
    const XLA_FFI_Args args{};
    const XLA_FFI_Rets rets{};
    xla::ffi::Future future =
        StartExchange({}, 0, session, 0, 0, 0, kNoRanks, 1, 0, xla::ffi::RemainingArgs(&args, 0),
                      xla::ffi::RemainingRets(&rets, 0));
    xla::ffi::Error found;
    future.OnReady([&](const std::optional<xla::ffi::Error>& error) {
      if (error) found = *error;
    });
    return found;
  });
}

}  // namespace
}  // namespace testing
}  // namespace jaxhet
