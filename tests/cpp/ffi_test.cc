#include <array>
#include <cstdint>
#include <latch>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "tests/cpp/testing.h"
#include "tests/cpp/world.h"
#include "xla_plugin/engine/engine.h"

// The handlers of XLA's FFI, called without XLA. Where the engine can't be found, every exception
// is an error that they return. One that crossed XLA's C interface would end the process.
namespace jaxhet {

// NOLINTNEXTLINE(misc-use-internal-linkage): the files below call it in this namespace
std::shared_ptr<Engine> FindTestEngine(int64_t session);

}  // namespace jaxhet

#define FindEngine FindTestEngine
#include "xla_plugin/ffi/handlers.cc"  // NOLINT(bugprone-suspicious-include)
#undef FindEngine

namespace jaxhet {

namespace {

constexpr int64_t kSession = 4;
Engine* engine_of_session = nullptr;

}  // namespace

std::shared_ptr<Engine> FindTestEngine(int64_t session) {
  if (session == kSession) return {engine_of_session, [](Engine* /*engine*/) {}};
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

// A buffer of no bytes.
struct Empty {
  XLA_FFI_Buffer raw{};
  xla::ffi::AnyBuffer buffer{&raw};
  xla::ffi::Result<xla::ffi::AnyBuffer> result{buffer};
};

TEST(FfiTest, StartOnAGpuReturnsEveryExceptionAsAnError) {
  ExpectErrors([](int64_t session) {
    const Empty empty;
    return Start({}, 0, session, 0, 0, empty.buffer, empty.result);
  });
}

TEST(FfiTest, DoneOnAGpuReturnsEveryExceptionAsAnError) {
  ExpectErrors([](int64_t session) {
    const Empty empty;
    return Done({}, 0, session, 0, 0, empty.buffer, empty.buffer, empty.result);
  });
}

TEST(FfiTest, PartOnAGpuReturnsEveryExceptionAsAnError) {
  ExpectErrors([](int64_t session) {
    const Empty empty;
    return Part({}, 0, session, 0, 0, empty.buffer, empty.buffer, empty.result, empty.result);
  });
}

TEST(FfiTest, ExchangeOnACpuReturnsEveryExceptionAsAnError) {
  ExpectErrors([](int64_t session) {
    const XLA_FFI_Args args{};
    const XLA_FFI_Rets rets{};
    xla::ffi::Future future = StartExchange({}, 0, session, 0, 0, xla::ffi::RemainingArgs(&args, 0),
                                            xla::ffi::RemainingRets(&rets, 0));
    xla::ffi::Error found;
    future.OnReady([&](const std::optional<xla::ffi::Error>& error) {
      if (error) found = *error;
    });
    return found;
  });
}

constexpr int64_t kOtherPlan = 9;

// An array of one byte.
struct OneByte {
  explicit OneByte(char& byte) {
    buffer.dtype = XLA_FFI_DataType_U8;
    buffer.data = &byte;
    buffer.rank = 1;
    buffer.dims = &size;
  }

  int64_t size = 1;
  XLA_FFI_Buffer buffer{};
  void* pointer = &buffer;
};

// Calls for exchanges of one byte by devices 100 and 101, the ranks 0 and 1 of this process.
class PlannedTest : public ::testing::Test {
 protected:
  PlannedTest() {
    engine_of_session = &world_.engine(0);
    world_.engine(0).AddPlan(
        kOtherPlan, PlanText(2), {},
        {{.kind = ExchangeKind::kPermute, .ranks = {0, 1, 1, 0}, .group_size = 2},
         {.kind = ExchangeKind::kPermute, .ranks = {0, 1}, .group_size = 2}});
  }

  // Results of both ranks for "ab", or the error.
  static std::string Exchange(int64_t plan, int64_t index) {
    std::string sent = "ab";
    std::string received = "..";
    std::string error;
    std::vector<xla::ffi::Future> futures;
    for (int32_t rank = 0; rank < 2; ++rank) {
      OneByte operand(sent[static_cast<size_t>(rank)]);
      OneByte result(received[static_cast<size_t>(rank)]);
      XLA_FFI_ArgType argument = XLA_FFI_ArgType_BUFFER;
      XLA_FFI_RetType returned = XLA_FFI_RetType_BUFFER;
      XLA_FFI_Args args{};
      args.size = 1;
      args.types = &argument;
      args.args = &operand.pointer;
      XLA_FFI_Rets rets{};
      rets.size = 1;
      rets.types = &returned;
      rets.rets = &result.pointer;
      futures.push_back(StartExchange({.run_id = plan + index}, 100 + rank, kSession, plan, index,
                                      {&args, 0}, {&rets, 0}));
    }
    std::latch ended(2);
    for (xla::ffi::Future& future : futures) {
      future.OnReady([&](const std::optional<xla::ffi::Error>& found) {
        if (found) error = found->message();
        ended.count_down();
      });
    }
    ended.wait();
    return error.empty() ? received : error;
  }

 private:
  World world_{{.num_processes = 1, .ranks_per_process = 2}};
};

TEST_F(PlannedTest, CallRunsThePlansExchangeOfItsIndex) {
  EXPECT_EQ(Exchange(kOtherPlan, 0), "ba");
  EXPECT_EQ(Exchange(kOtherPlan, 1), std::string({'\0', 'a'}));
}

TEST_F(PlannedTest, CallOfAnExchangeThatIsNotPlannedIsAnError) {
  EXPECT_THAT(Exchange(kOtherPlan, 2), HasSubstr("exchange 2 is not in plan 9, which has 2"));
  EXPECT_THAT(Exchange(kOtherPlan, -1), HasSubstr("exchange -1 is not in plan 9"));
  EXPECT_THAT(Exchange(11, 0), HasSubstr("this process has no plan 11"));
}

}  // namespace
}  // namespace testing
}  // namespace jaxhet
