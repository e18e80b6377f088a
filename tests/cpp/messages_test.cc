#include "xla_plugin/engine/common/messages.h"

#include <array>

#include "tests/cpp/testing.h"

// Texts of failures, made of facts.
namespace jaxhet::testing {
namespace {

using std::chrono::milliseconds;

RankFacts Own() {
  return {.process = 0,
          .rank = "rank 0/2 cpu0",
          .rank_and_process = "rank 0 of process 0 (a), cpu0",
          .exchange = "exchange 3 (psum at f.py:1)",
          .plan = std::make_shared<const Plan>(Plan{"psum\n", {}, 1})};
}

RankFacts Peer() {
  return {.process = 1,
          .rank = "rank 1/2 cpu1",
          .rank_and_process = "rank 1 of process 1 (b), cpu1",
          .exchange = "exchange 2 (pmax at f.py:2)",
          .plan = std::make_shared<const Plan>(Plan{"pmax\n", {}, 1})};
}

void ExpectText(const Error& error, ErrorCode code, int process, std::string_view text,
                const Location& location = Location::current()) {
  const CalledAt here(location);
  EXPECT_EQ(error.code(), code);
  EXPECT_EQ(error.failed_process(), process);
  EXPECT_EQ(error.text(), text);
}

constexpr std::string_view kLateEnd =
    "The process went another way in its program, is stopped, or is slower than the deadline; if "
    "it is slower, raise the deadline.";

TEST(MessagesTest, LatePeersAreDescribedByTheirFacts) {
  LatePeer peer{.name = Peer().rank_and_process,
                .waited = milliseconds(300),
                .has_started = false,
                .last_exchange = {},
                .last_ago = {}};
  const auto text = [&] {
    const std::string all(LateError(Own(), {&peer, 1}, 1).text());
    EXPECT_TRUE(all.starts_with("[rank 0/2 cpu0] exchange 3 (psum at f.py:1): "));
    EXPECT_TRUE(all.ends_with(kLateEnd));
    const size_t start = WhereText(Own()).size();
    return all.substr(start, all.size() - start - kLateEnd.size());
  };
  const std::string name = "rank 1 of process 1 (b), cpu1";
  EXPECT_EQ(text(), name + " has not started it within 300 ms; it has started none so far. ");
  peer.last_exchange = Peer().exchange;
  EXPECT_EQ(text(), name +
                        " has not started it within 300 ms; it last started "
                        "exchange 2 (pmax at f.py:2). ");
  peer.last_ago = milliseconds(7);
  EXPECT_EQ(text(), name +
                        " has not started it within 300 ms; it last started "
                        "exchange 2 (pmax at f.py:2), 7 ms ago. ");
  peer.has_started = true;
  EXPECT_EQ(text(), name +
                        " is too slow: it has started it, but its data has not arrived within "
                        "300 ms. ");
}

TEST(MessagesTest, AllLatePeersAreNamed) {
  const LatePeer first{.name = "rank 1",
                       .waited = milliseconds(1),
                       .has_started = false,
                       .last_exchange = {},
                       .last_ago = {}};
  LatePeer second = first;
  second.name = "rank 2";
  ExpectText(
      LateError(Own(), std::array{first, second}, 2), ErrorCode::kDeadline, 2,
      StrCat("[rank 0/2 cpu0] exchange 3 (psum at f.py:1): ",
             "rank 1 has not started it within 1 ms; it has started none so far. ",
             "rank 2 has not started it within 1 ms; it has started none so far. ", kLateEnd));
}

TEST(MessagesTest, MismatchesNameBothSides) {
  ExpectText(ExchangeMismatchError(Own(), Peer(), 8, 16), ErrorCode::kPlanMismatch, 1,
             "[rank 0/2 cpu0] exchange 3 (psum at f.py:1): rank 1 of process 1 (b), cpu1 is at "
             "exchange 2 (pmax at f.py:2) (16 bytes, here 8). Make the program's branches depend "
             "on values that are equal on all ranks.");
  ExpectText(UnknownProgramError(Own(), Peer()), ErrorCode::kPlanMismatch, 1,
             "[rank 0/2 cpu0] exchange 3 (psum at f.py:1): rank 1 of process 1 (b), cpu1 runs "
             "another program, whose plan it has not sent. Run the same program on all ranks in "
             "the same order.");
}

}  // namespace
}  // namespace jaxhet::testing
