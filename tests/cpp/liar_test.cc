#include "tests/cpp/liar.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tests/cpp/testing.h"
#include "tests/cpp/world.h"
#include "xla_plugin/base/error.h"

// A peer that talks nonsense.
namespace jaxhet::testing {
namespace {

using ::testing::HasSubstr;

TEST(LiarTest, RefusesStartWithoutPlan) {
  Liar liar;
  liar.SendStart(GatherStart(8));
  liar.ExpectRefusal("a plan that it never sent");
}

TEST(LiarTest, RefusesStartTwice) {
  Liar liar;
  liar.SendPlan();
  liar.SendStart(GatherStart(8'000));
  liar.SendStart(GatherStart(8'000));
  liar.ExpectRefusal("started the same exchange twice");
}

TEST(LiarTest, RefusesCutMessages) {
  for (const auto type : {MessageType::kPlan, MessageType::kStart, MessageType::kFail}) {
    Liar liar;
    liar.channel().Send(type, "cut");
    liar.ExpectRefusal("a message is cut");
  }
}

TEST(LiarTest, RefusesPlansThatAreLongerThanTheirMessage) {
  for (const uint64_t text_bytes : {uint64_t{6}, uint64_t{1} << 40, UINT64_MAX}) {
    Liar liar;
    liar.SendPlan({.plan = kPlan, .text_bytes = text_bytes}, "five.");
    liar.ExpectRefusal("a message is cut");
  }
}

TEST(LiarTest, TakesPlansOfAnyLength) {
  Liar liar;
  liar.SendPlan({.plan = 30, .text_bytes = 0}, "");
  liar.SendPlan({.plan = 31, .text_bytes = 0}, "five.");
  liar.SendPlan({.plan = 32, .text_bytes = 4}, "five.");
  liar.SendPlan({.plan = 33, .text_bytes = 5}, "five.");
  const auto found = [&](int64_t plan) {
    return liar.engine().Read([&](const ProgressEngine& progress) {
      const Plan* const theirs = progress.peers().PlansOf(1).Find(plan);
      return theirs == nullptr ? "none" : StrCat(theirs->text, "|", theirs->program);
    });
  };
  const Time limit = Clock::now() + kLong;
  while (found(33) == "none" && Clock::now() < limit) std::this_thread::yield();
  EXPECT_EQ(found(30), "|");
  EXPECT_EQ(found(31), "|five.");
  EXPECT_EQ(found(32), "five|.");
  EXPECT_EQ(found(33), "five.|");
}

TEST(LiarTest, RefusesSecondIntroduction) {
  Liar liar;
  liar.channel().Send(MessageType::kHello);
  liar.ExpectRefusal("it introduced itself twice");
}

TEST(LiarTest, RefusesMissingEagerBytes) {
  Liar liar;
  liar.SendPlan();
  StartInfo start = GatherStart(8);
  start.eager = 1;
  liar.SendStart(start, "seven..");
  const auto error = Gather(liar.engine(), 0, 8);
  ASSERT_TRUE(error.has_value());
  EXPECT_THAT(error->what(), HasSubstr("eager bytes are missing"));
}

TEST(LiarTest, RefusesChunksOutOfPlace) {
  const auto refusal = [&](const Liar::Chunk& wrong, std::string_view words) {
    Liar liar;
    liar.SendPlan();
    Call call(GatherRequest(0), {4'000}, {8'000});
    call.StartOn(liar.engine());
    liar.AwaitStarts(1);
    liar.SendStart(GatherStart(4'000));
    EXPECT_EQ(write(liar.data().get(), &wrong, sizeof wrong), sizeof wrong);
    liar.ExpectRefusal(words);
    EXPECT_TRUE(call.Wait().has_value());
  };
  Liar::Chunk wrong;
  wrong.ticket = 77;
  refusal(wrong, "the transfer 77, which is not open");
  wrong = Liar::Chunk();
  wrong.offset = SIZE_MAX - 10;
  refusal(wrong, "lies outside of the transfer");
  wrong = Liar::Chunk();
  wrong.num_bytes = 4'001;
  refusal(wrong, "lies outside of the transfer");
  wrong = Liar::Chunk();
  wrong.magic = 5;
  refusal(wrong, "not with JXC1");
}

// Bytes that arrive twice must not stand for others that never arrived.
TEST(LiarTest, RefusesChunksThatOverlap) {
  Liar liar;
  liar.SendPlan();
  Call call(GatherRequest(0), {8'000}, {16'000});
  call.StartOn(liar.engine());
  liar.AwaitStarts(1);
  liar.SendStart(GatherStart(8'000));
  const std::string bytes(4'000, 'A');
  for (int i = 0; i < 2; ++i) liar.SendChunk({}, bytes);
  liar.ExpectRefusal("sent bytes of a transfer twice");
  EXPECT_TRUE(call.Wait().has_value());
}

TEST(LiarTest, TakesChunksInAnyOrder) {
  Liar liar;
  liar.SendPlan();
  Call call(GatherRequest(0), {8'000}, {16'000});
  call.StartOn(liar.engine());
  liar.AwaitStarts(1);
  liar.SendStart(GatherStart(8'000));
  for (const size_t offset : {6'000U, 0U, 4'000U, 2'000U}) {
    liar.SendChunk({.offset = offset, .num_bytes = 2'000}, std::string(2'000, 'A'));
  }
  EXPECT_FALSE(call.Wait());
  EXPECT_TRUE(std::ranges::all_of(std::span(call.results[0]).subspan(8'000),
                                  [](std::byte byte) { return byte == std::byte{'A'}; }));
}

void RefusesStart(const StartInfo& start, std::string_view words, int num_processes = 2,
                  const Location& location = Location::current()) {
  for (const bool is_late : {false, true}) {  // our rank waits for it, or has not come to it
    Liar liar(num_processes);
    liar.SendPlan();
    std::optional<Call> call;
    if (is_late) {
      call.emplace(GatherRequest(0), std::vector<size_t>{4'000}, std::vector<size_t>{8'000});
      call->StartOn(liar.engine());
      liar.AwaitStarts(1);
    }
    liar.SendStart(start);
    liar.ExpectRefusal(words, location);
    if (call) {
      EXPECT_TRUE(call->Wait().has_value());
    }
  }
}

StartInfo Changed(const std::function<void(StartInfo&)>& change) {
  StartInfo start = GatherStart(4'000);
  change(start);
  return start;
}

TEST(LiarTest, RefusesStartsWithFieldsOutOfRange) {
  RefusesStart(Changed([](StartInfo& start) { start.run = 0; }), "with the run 0");
  RefusesStart(Changed([](StartInfo& start) { start.run = -1; }), "with the run -1");
  RefusesStart(Changed([](StartInfo& start) { start.index = 8; }), "with the index 8");
  RefusesStart(Changed([](StartInfo& start) { start.index = int64_t{1} << 62; }), "with the index");
  RefusesStart(Changed([](StartInfo& start) { start.index = -1; }), "with the index -1");
  RefusesStart(Changed([](StartInfo& start) { start.sequence = -1; }), "with the sequence -1");
  RefusesStart(Changed([](StartInfo& start) { start.kind = 3; }), "with the kind 3");
  RefusesStart(Changed([](StartInfo& start) { start.ticket = 0; }), "with the ticket 0");
  RefusesStart(Changed([](StartInfo& start) { start.eager = 2; }), "with the eager flag 2");
}

TEST(LiarTest, RefusesStartsOfForeignRanks) {
  RefusesStart(Changed([](StartInfo& start) { start.source = 0; }), "speaks for rank 0");
  RefusesStart(Changed([](StartInfo& start) { start.source = 2; }), "speaks for rank 2", 3);
  RefusesStart(Changed([](StartInfo& start) { start.source = -5; }), "speaks for rank -5");
  RefusesStart(Changed([](StartInfo& start) { start.source = 1 << 30; }), "speaks for rank");
  RefusesStart(Changed([](StartInfo& start) { start.destination = 1; }),
               "started an exchange with rank 1, which is not of this process");
  RefusesStart(Changed([](StartInfo& start) { start.destination = -7; }), "with rank -7");
}

// A peer may be ahead: its starts are looked at when the ranks are known.
TEST(LiarTest, RefusesForeignRanksThatCameBeforeTheRanks) {
  Liar liar(2, {"socket"}, /*knows_ranks=*/false);
  liar.SendPlan();
  liar.SendStart(Changed([](StartInfo& start) { start.source = 0; }));
  liar.AwaitArrival();
  EXPECT_EQ(liar.engine().failure(), nullptr);
  liar.engine().SetRanks(RanksOf({}));
  liar.ExpectRefusal("speaks for rank 0");
}

TEST(LiarTest, RefusesPlansThatChange) {
  Liar liar;
  liar.SendPlan();
  liar.SendPlan();
  liar.ExpectRefusal("sent the plan 7 twice");
}

TEST(LiarTest, RefusesMessagesThatAreTooLong) {
  for (const auto type : {MessageType::kHeartbeat, MessageType::kGoodbye}) {
    Liar liar;
    liar.channel().Send(type, "more");
    liar.ExpectRefusal("a message is 4 bytes too long");
  }
}

TEST(LiarTest, RefusesMessagesAfterGoodbye) {
  Liar liar;
  liar.channel().Send(MessageType::kGoodbye);
  liar.channel().Send(MessageType::kHeartbeat);
  liar.ExpectRefusal("has left the job and still sends messages");
}

TEST(LiarTest, RefusesFailuresOfNobody) {
  for (const int failed_process : {-1, 2}) {
    Liar liar;
    const FailInfo info{ErrorCode::kDevice, failed_process};
    const std::string_view text = "smoke";
    liar.channel().Send(MessageType::kFail,
                        std::array{ObjectIovec(info), ToIovec(text.data(), text.size())});
    liar.ExpectRefusal("which does not exist: smoke");
  }
}

TEST(LiarTest, RefusesTablesOfTransportsThatAreCut) {
  auto ends = ConnectAll(2, 1);
  ControlChannel channel(std::move(ends[1][0].control));
  const auto engine = MakeEngine(0, FaultOptions("socket"), std::move(ends[0]));
  const HelloInfo info{1};
  const std::string table = PackStrings(std::array<std::string, 2>{"socket", "ok"});
  channel.Send(MessageType::kHello,
               std::array{ObjectIovec(info), ToIovec(table.data(), table.size())});
  EXPECT_THAT(ThrownText([&] { engine->Connect(kLong); }),
              HasSubstr("process 1 (host 1): its table of transports has 2 entries"));
}

}  // namespace
}  // namespace jaxhet::testing
