#include <array>
#include <deque>
#include <map>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tests/cpp/device_world.h"
#include "tests/cpp/testing.h"
#include "tests/cpp/world.h"
#include "xla_plugin/engine/common/plans.h"

// Ranks that run different programs, and executions that overlap.
namespace jaxhet::testing {
namespace {

using ::testing::AnyOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

constexpr int64_t kFirstPlan = 20;
constexpr int64_t kSecondPlan = 21;
constexpr std::string_view kExchanges = "f32[6] all-reduce sum\tpsum at f.py:3\n";
constexpr std::string_view kOtherExchanges = "f32[6] all-reduce max\tpmax at f.py:3\n";

std::string MismatchOf(const Plan& ours, const Plan& theirs) {
  return DescribeMismatch({.rank = "rank 0/2 cuda0", .plan = ours},
                          {.rank = "rank 1/2 rocm1", .plan = theirs});
}

Plan PlanOf(std::string_view exchanges, std::string_view program) {
  return {.text = std::string(exchanges), .program = std::string(program), .num_exchanges = 0};
}

TEST(ProgramTest, MismatchShowsEquationsThatDiffer) {
  const Plan ours =
      PlanOf(kExchanges, "jit_step 3f2a\nmul a b\tf.py:1\nadd c d\tf.py:2\nsin e\nneg f\ncos g\n");
  const Plan theirs =
      PlanOf(kOtherExchanges, "jit_eval 77aa\nmul a b\tg.py:1\nsub c d\tf.py:2\nadd e e\nneg f\n");
  EXPECT_EQ(MismatchOf(ours, theirs),
            " runs another program: jit_eval, but this rank runs jit_step. Equation 1 is the "
            "first that differs.\n"
            "  rank 0/2 cuda0:\n"
            "    1: add c d (f.py:2)\n"
            "    2: sin e\n"
            "    3: neg f\n"
            "  rank 1/2 rocm1:\n"
            "    1: sub c d (f.py:2)\n"
            "    2: add e e\n"
            "    3: neg f\n"
            "Exchange 0 is the first that differs.\n"
            "  rank 0/2 cuda0: f32[6] all-reduce sum (psum at f.py:3)\n"
            "  rank 1/2 rocm1: f32[6] all-reduce max (pmax at f.py:3)\n"
            "Run the same programs in the same order on all ranks. Put code that differs "
            "between platforms on purpose into jaxhet.per_platform.");
}

TEST(ProgramTest, MismatchShowsTheEndOfTheShorterProgram) {
  const Plan longer = PlanOf(kExchanges, "jit_f 1\nadd a b\nmul c d\nneg e\n");
  const Plan shorter = PlanOf(kExchanges, "jit_f 2\nadd a b\n");
  const std::string text = MismatchOf(longer, shorter);
  EXPECT_THAT(text, HasSubstr("Equation 1 is the first that differs"));
  EXPECT_THAT(text, HasSubstr("cuda0:\n    1: mul c d\n    2: neg e\n    (no more equations)\n"));
  EXPECT_THAT(text, HasSubstr("rocm1:\n    (no more equations)\n"));
  EXPECT_THAT(MismatchOf(shorter, longer),
              HasSubstr("cuda0:\n    (no more equations)\n  rank 1/2 rocm1"));
  EXPECT_THAT(MismatchOf(longer, PlanOf(kExchanges, "jit_g 3")),
              HasSubstr("rocm1:\n    (no more equations)\n"));
}

TEST(ProgramTest, MismatchShowsDigestsWhenNoEquationDiffers) {
  const std::string text = MismatchOf(PlanOf(kExchanges, "jit_f 11\nadd a b\tf.py:1\n"),
                                      PlanOf(kExchanges, "jit_f 22\nadd a b\tg.py:9\n"));
  EXPECT_THAT(text, HasSubstr(" runs another program of the same name, jit_f. "));
  EXPECT_THAT(text, HasSubstr("The digest of the program is the first that differs.\n"));
  EXPECT_THAT(text, HasSubstr("  rank 0/2 cuda0: jit_f 11\n  rank 1/2 rocm1: jit_f 22\n"));
  EXPECT_THAT(text, Not(AnyOf(HasSubstr("Equation"), HasSubstr("Exchange"))));
}

TEST(ProgramTest, MismatchShowsExchangesOnlyWithoutDifferentPrograms) {
  const std::string_view listing = "jit_f 11\nadd a b\tf.py:1\n";
  const std::string expected =
      " runs another program. Exchange 0 is the first that differs.\n"
      "  rank 0/2 cuda0: f32[6] all-reduce sum (psum at f.py:3)\n"
      "  rank 1/2 rocm1: f32[6] all-reduce max (pmax at f.py:3)\n"
      "Run the same program, with the same shapes, on all ranks in the same order.";
  using Listings = std::pair<std::string_view, std::string_view>;
  for (const auto& [ours, theirs] : {Listings{listing, listing}, Listings{"", ""},
                                     Listings{listing, ""}, Listings{"", listing}}) {
    EXPECT_EQ(MismatchOf(PlanOf(kExchanges, ours), PlanOf(kOtherExchanges, theirs)), expected);
  }
}

TEST(ProgramTest, MismatchCutsLongEquations) {
  const std::string wide = StrCat("add ", std::string(2'000, 'x'), "\tf.py:1");
  std::string umlauts = "y";  // the cut falls into the middle of a character
  for (int i = 0; i < 400; ++i) umlauts += "ä";
  const std::string text =
      MismatchOf(PlanOf(kExchanges, StrCat("jit_f 1\n", wide, "\n", "neg a\t", umlauts)),
                 PlanOf(kExchanges, StrCat("jit_f 2\n", umlauts, "\n")));
  EXPECT_THAT(text, HasSubstr(StrCat("0: add ", std::string(290, 'x'), "… (f.py:1)\n")));
  EXPECT_THAT(text, HasSubstr(StrCat("0: ", umlauts.substr(0, 299), "…\n")));
  EXPECT_THAT(text, HasSubstr(StrCat("1: neg a (", umlauts.substr(0, 149), "…)\n")));
}

ExchangeRequest Request(int rank, std::vector<int> group, int64_t run_id, int64_t plan,
                        int64_t index = 0) {
  ExchangeRequest request = GatherRequest(rank, run_id);
  request.plan = plan;
  request.index = index;
  request.group = std::move(group);
  return request;
}

// Starts of gathers, of which the results are of no interest.
class Calls {
 public:
  void Start(Engine& engine, ExchangeRequest request, size_t num_bytes = 5'000) {
    const size_t result_bytes = num_bytes * request.group.size();
    calls_.emplace_back(std::move(request), std::vector{num_bytes}, std::vector{result_bytes});
    calls_.back().StartOn(engine);
  }
  std::vector<std::string> Errors() {
    std::vector<std::string> texts;
    for (Call& call : calls_) {
      const auto error = call.Wait();
      texts.emplace_back(error ? error->what() : "");
    }
    calls_.clear();
    return texts;
  }
  void ExpectSuccess(const Location& location = Location::current()) {
    const CalledAt here(location);
    EXPECT_THAT(Errors(), Each(IsEmpty()));
  }

 private:
  std::deque<Call> calls_;
};

void AddPlans(World& world, std::string_view first_program, std::string_view second_program) {
  for (int process = 0; process < 2; ++process) {
    Engine& engine = world.engine(process);
    engine.AddPlan(kFirstPlan, PlanText(3), std::string(first_program));
    engine.AddPlan(kSecondPlan, PlanText(3, "another line"), std::string(second_program));
  }
}

TEST(ProgramTest, ProgramsThatDifferAreShownForDevices) {
  DeviceWorld world(DeviceOptions(2));
  world.engine(0).AddPlan(kFirstPlan, PlanText(3), "jit_a 1\nadd a b\n");
  world.engine(1).AddPlan(kSecondPlan, PlanText(3), "jit_b 2\nsub a b\n");
  Side zero(0, SwapPairs(), 1000);
  Side one(1, SwapPairs(), 1000);
  zero.WithPlan(kFirstPlan).Start(world);
  zero.Done(world);
  const std::string text = ThrownText([&] { one.WithPlan(kSecondPlan).Start(world); });
  EXPECT_TRUE(world.IsIdleWithin(0, kLong));
  EXPECT_THAT(text, HasSubstr(" runs another program: jit_"));
  EXPECT_THAT(text, HasSubstr(". Equation 0 is the first that differs."));
  EXPECT_THAT(text, HasSubstr("cpu0:\n    0: add a b\n    (no more equations)\n"));
  EXPECT_THAT(text, HasSubstr("cpu1:\n    0: sub a b\n    (no more equations)\n"));
  EXPECT_THAT(text, Not(HasSubstr("Exchange")));
}

constexpr int64_t kNumPrograms = 5;

// Two processes that know programs with equal exchanges. The programs differ in one equation.
struct Programs {
  explicit Programs(const std::string& transport) : world({.transports = {transport}}) {
    for (int64_t plan = kFirstPlan; plan < kFirstPlan + kNumPrograms; ++plan) {
      for (const int process : {0, 1}) {
        world.engine(process).AddPlan(plan, StrCat("jit_f ", plan, "\top"),
                                      StrCat("jit_f ", plan, "\nmul a ", plan, "\n"));
      }
    }
  }

  // Each rank calls a program. Nothing arrives from the first calls that differ on.
  void CallBoth(std::array<int64_t, 2> plans, int64_t run_id, size_t num_bytes) {
    std::map<int, Call> calls;
    for (const int rank : run_id % 2 == 0 ? std::array{0, 1} : std::array{1, 0}) {
      calls.try_emplace(rank, Request(rank, {0, 1}, run_id, plans.at(static_cast<size_t>(rank))),
                        std::vector{num_bytes}, std::vector{2 * num_bytes});
      calls.at(rank).StartOn(world.engine(rank));
    }
    const bool is_first = !is_refused && plans[0] != plans[1];
    is_refused |= is_first;
    for (auto& [rank, call] : calls) {
      const auto error = call.Wait();
      const std::string text = error ? error->what() : "";
      const std::vector untouched(num_bytes, std::byte{0xEE});
      const auto received =
          std::span(call.results[0]).subspan(rank == 0 ? num_bytes : 0, num_bytes);
      EXPECT_EQ(text.empty(), !is_refused) << text;
      EXPECT_TRUE(AreEqual(received, is_refused ? untouched : calls.at(1 - rank).operands[0]));
      if (!is_first) continue;
      EXPECT_THAT(text, HasSubstr("jaxhet.PlanMismatchError: [rank "));
      EXPECT_THAT(text, HasSubstr("another program of the same name, jit_f. Equation 0 is the"));
      for (const int64_t plan : plans) EXPECT_THAT(text, HasSubstr(StrCat("mul a ", plan)));
    }
  }

  World world;
  bool is_refused = false;
};

TEST(ProgramTest, OtherOrdersAreRefusedBeforeAnythingArrives) {
  std::mt19937 random(7);  // NOLINT(bugprone-random-generator-seed): a run can be repeated
  const auto below = [&](int64_t end) {
    return std::uniform_int_distribution<int64_t>(0, end - 1)(random);
  };
  for (int order = 0; order < 1'000; ++order) {
    Programs programs(order % 2 == 0 ? "socket" : "process_vm");
    for (int64_t run_id = 1; run_id <= 6; ++run_id) {
      const int64_t first = kFirstPlan + below(kNumPrograms);
      const int64_t second = below(4) > 0 ? first : kFirstPlan + below(kNumPrograms);
      // With the start, or after it.
      programs.CallBoth({first, second}, run_id, below(2) == 0 ? 8 : 5'000);
    }
  }
}

TEST(ProgramTest, ProgramThatIsTooLongIsIgnored) {
  World world({.num_processes = 1});
  const std::string longest(kMaxProgramBytes, 'x');
  world.engine(0).AddPlan(kFirstPlan, PlanText(3), longest);
  world.engine(0).AddPlan(kSecondPlan, PlanText(3), longest + "x");
  world.engine(0).Read([&](const ProgressEngine& progress) {
    EXPECT_EQ(progress.peers().plans().Find(kFirstPlan)->program, longest);
    EXPECT_TRUE(progress.peers().plans().Find(kSecondPlan)->program.empty());
    EXPECT_EQ(progress.peers().plans().Find(kSecondPlan)->text, PlanText(3));
  });
}

constexpr std::string_view kAdvice =
    "Launch programs that exchange over islands from one thread, one after the other, and leave "
    "jax_cpu_enable_async_dispatch off.";

void ExpectOverlap(const std::vector<std::string>& texts, std::string_view words,
                   const Location& location = Location::current()) {
  const CalledAt here(location);
  EXPECT_THAT(texts, SizeIs(2));
  for (const std::string& text : texts) {
    EXPECT_THAT(text, HasSubstr("jaxhet.UsageError: [rank 0/2 cpu0] exchange "));
    EXPECT_THAT(text, HasSubstr("two executions of programs overlap on this rank: "));
    EXPECT_THAT(text, HasSubstr(words));
    EXPECT_THAT(text, HasSubstr(kAdvice));
  }
}

TEST(ProgramTest, OverlapOfTwoProgramsIsRefused) {
  World world({.num_processes = 2});
  AddPlans(world, "jit_a 1\n", "jit_b 2\n");
  Calls calls;
  calls.Start(world.engine(0), Request(0, {0, 1}, 1, kFirstPlan, 1));
  calls.Start(world.engine(0), Request(0, {1, 0}, 2, kSecondPlan));  // another communicator
  ExpectOverlap(calls.Errors(),
                "one starts exchange 0 (op 0) of jit_b, and another still has exchange 1 (op 1) of "
                "jit_a open. ");
  const auto theirs = world.engine(1).WaitFailure(kLong);
  EXPECT_TRUE(theirs != nullptr && theirs->code() == ErrorCode::kUsage &&
              theirs->failed_process() == 0);
}

TEST(ProgramTest, OverlapOfOneProgramIsRefused) {
  for (const auto& [second_run, second_plan] : {std::pair{2, kPlan}, std::pair{1, kFirstPlan}}) {
    World world({.num_processes = 2});
    AddPlans(world, "", "");
    Calls calls;
    calls.Start(world.engine(0), Request(0, {0, 1}, 1, kPlan));
    calls.Start(world.engine(0), Request(0, {0, 1}, second_run, second_plan));
    ExpectOverlap(calls.Errors(),
                  "one starts exchange 0 (op 0), and another still has exchange 0 (op 0) open. ");
  }
}

// The first execution has none open when the second one starts, and then continues.
TEST(ProgramTest, ExecutionThatContinuesAfterAnotherIsRefused) {
  World world({.num_processes = 1});
  Calls calls;
  for (const int64_t run_id : {1, 2}) {
    calls.Start(world.engine(0), Request(0, {0}, run_id, kPlan));
    calls.ExpectSuccess();
  }
  calls.Start(world.engine(0), Request(0, {0}, 1, kPlan, 1));
  const std::string text = calls.Errors().at(0);
  EXPECT_THAT(text,
              HasSubstr("jaxhet.UsageError: [rank 0/1 cpu0] exchange 1 (op 1): two executions of "
                        "programs overlap on this rank: the earlier one starts this exchange"));
  EXPECT_THAT(text, HasSubstr(kAdvice));
}

// One rank of a process may be ahead of another.
TEST(ProgramTest, ExecutionsOfTwoRanksMayOverlap) {
  World world({.num_processes = 2, .ranks_per_process = 2});
  Calls calls;
  for (const int rank : {0, 1, 2, 3}) {
    calls.Start(world.EngineOf(rank),
                Request(rank, {rank % 2, rank % 2 + 2}, 1 + rank % 2, kPlan, rank % 2));
  }
  calls.ExpectSuccess();
}

}  // namespace
}  // namespace jaxhet::testing
