#include "xla_plugin/engine/common/messages.h"

#include <array>

#include "tests/cpp/testing.h"

// Texts of failures, made of facts.
namespace jaxhet::testing {
namespace {

using std::chrono::milliseconds;

RankFacts FactsOf(int process, std::string_view exchange) {
  return {.process = process,
          .rank = StrCat("rank ", process, "/2 cpu"),
          .rank_and_process = StrCat("rank ", process, " of process ", process),
          .exchange = std::string(exchange),
          .plan = std::make_shared<const Plan>(Plan{"psum\n", {}, 1})};
}

RankFacts Own() { return FactsOf(0, "exchange 3 (psum at f.py:1)"); }
RankFacts Peer() { return FactsOf(1, "exchange 2 (pmax at f.py:2)"); }

void ExpectText(const Error& error, ErrorCode code, int process, std::string_view text,
                const Location& location = Location::current()) {
  const CalledAt here(location);
  EXPECT_EQ(error.code(), code);
  EXPECT_EQ(error.failed_process(), process);
  EXPECT_EQ(error.text(), StrCat("[rank 0/2 cpu] exchange 3 (psum at f.py:1): ", text));
}

TEST(MessagesTest, LatePeersAreDescribedByTheirFacts) {
  constexpr milliseconds kWaited{300};
  const std::array<LatePeer, 4> peers = {{{"rank 1", kWaited, false, {}, {}},
                                          {"rank 2", kWaited, false, Peer().exchange, {}},
                                          {"rank 3", kWaited, false, "exchange 4", milliseconds(7)},
                                          {"rank 4", kWaited, true, "exchange 4", {}}}};
  ExpectText(LateError(Own(), peers, 4), ErrorCode::kDeadline, 4,
             "rank 1 has not started it within 300 ms; it has started none so far. "
             "rank 2 has not started it within 300 ms; it last started "
             "exchange 2 (pmax at f.py:2). "
             "rank 3 has not started it within 300 ms; it last started exchange 4, 7 ms ago. "
             "rank 4 is too slow: it has started it, but its data has not arrived within 300 ms. "
             "The process went another way in its program, is stopped, or is slower than the "
             "deadline; if it is slower, raise the deadline.");
}

TEST(MessagesTest, MismatchesNameBothSides) {
  ExpectText(ExchangeMismatchError(Own(), Peer(), 8, 16), ErrorCode::kPlanMismatch, 1,
             "rank 1 of process 1 is at exchange 2 (pmax at f.py:2) (16 bytes, here 8). Make the "
             "program's branches depend on values that are equal on all ranks.");
  ExpectText(UnknownProgramError(Own(), Peer()), ErrorCode::kPlanMismatch, 1,
             "rank 1 of process 1 runs another program, whose plan it has not sent. Run the same "
             "program on all ranks in the same order.");
}

}  // namespace
}  // namespace jaxhet::testing
