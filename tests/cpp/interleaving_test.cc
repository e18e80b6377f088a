#include <algorithm>
#include <array>
#include <cstddef>
#include <deque>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tests/cpp/testing.h"
#include "tests/cpp/world.h"

// Orders of calls of five programs with equal exchanges, of which the two processes of a job make
// one each. Engines, connections and memory are real; the programs are their texts, as Python
// writes them (`jaxhet/_traced/jaxprs.py`), and one exchange each.
namespace jaxhet::testing {
namespace {

using ::testing::HasSubstr;

constexpr int kPrograms = 5;
constexpr int kOrders = 1'000;
constexpr size_t kCalls = 6;
constexpr std::array<std::string_view, 2> kTransports = {"process_vm", "socket"};
constexpr std::byte kUntouched{0xEE};  // Call fills results with it

using Order = std::vector<int>;

std::string Constant(int program) { return StrCat(program, ".5:f32[]"); }

// Differs from the others in one equation.
std::string Listing(int program) {
  return StrCat("jit(<lambda>) ", program, "3f2a\narguments ()\nin a0:f32[4]\ne0: f32[1] = mul a0 ",
                Constant(program), "\tf.py:9\ne1: f32[1] = psum axes=('x') e0\tf.py:9\nout e1\n");
}

// Plans with equal lines, except for the program.
std::string PlanOf(int program) {
  return StrCat("jit__lambda:", program,
                "3f2a all_gather all-reduce sum flat f32[1] {{0,1}}\tpsum f.py:9\n");
}

// Two processes of one rank each that know the five programs.
class Job {
 public:
  explicit Job(std::string_view transport)
      : world_({.num_processes = 2, .transports = {std::string(transport)}}) {
    for (int process = 0; process < 2; ++process) {
      for (int program = 0; program < kPrograms; ++program) {
        world_.engine(process).AddPlan(kFirstPlan + program, PlanOf(program), Listing(program));
      }
    }
  }

  // Each process calls a program, one after the other or the other way round.
  std::array<Call*, 2> Start(std::array<int, 2> programs, size_t num_bytes, int first) {
    std::array<Call*, 2> calls{};
    ++run_id_;
    for (const int rank : {first, 1 - first}) {
      const auto at = static_cast<size_t>(rank);
      ExchangeRequest request = GatherRequest(rank, run_id_ * kPrograms + programs[at]);
      request.plan = kFirstPlan + programs[at];
      calls_.emplace_back(std::move(request), std::vector{num_bytes}, std::vector{2 * num_bytes});
      calls[at] = &calls_.back();
      calls_.back().StartOn(world_.engine(rank));
    }
    return calls;
  }

 private:
  static constexpr int64_t kFirstPlan = 20;
  World world_;
  std::deque<Call> calls_;
  int64_t run_id_ = 0;
};

// The part of a rank's result that the other one sends.
std::span<const std::byte> Received(const Call& call, int rank) {
  const std::span<const std::byte> result = call.results.at(0);
  return rank == 0 ? result.subspan(result.size() / 2) : result.first(result.size() / 2);
}

void ExpectDelivered(std::array<Call*, 2> calls, size_t num_bytes) {
  for (const int rank : {0, 1}) {
    Call& call = *calls[static_cast<size_t>(rank)];
    const auto error = call.Wait();
    EXPECT_FALSE(error) << (error ? error->what() : "");
    EXPECT_TRUE(AreEqual(Received(call, rank), Pattern(1 - rank, 0, num_bytes)));
  }
}

void ExpectRefused(std::array<Call*, 2> calls, std::array<int, 2> programs) {
  for (const int rank : {0, 1}) {
    Call& call = *calls[static_cast<size_t>(rank)];
    const auto error = call.Wait();
    const std::string text = error ? error->what() : "";
    EXPECT_THAT(text, HasSubstr("jaxhet.PlanMismatchError: [rank "));
    EXPECT_THAT(
        text,
        HasSubstr("another program of the same name, jit(<lambda>). Equation 2 is the first"));
    for (const int program : programs) EXPECT_THAT(text, HasSubstr(Constant(program)));
    EXPECT_TRUE(std::ranges::all_of(Received(call, rank), [](auto b) { return b == kUntouched; }));
  }
}

// Calls after a refusal fail as well, whether the two processes agree or not.
void ExpectFailed(std::array<Call*, 2> calls) {
  for (const int rank : {0, 1}) {
    Call& call = *calls[static_cast<size_t>(rank)];
    EXPECT_TRUE(call.Wait().has_value());
    EXPECT_TRUE(std::ranges::all_of(Received(call, rank), [](auto b) { return b == kUntouched; }));
  }
}

class Draw {
 public:
  int Below(int end) { return std::uniform_int_distribution(0, end - 1)(generator_); }
  Order Programs() {
    Order order(kCalls);
    for (int& program : order) program = Below(kPrograms);
    return order;
  }
  // Differs from `order`.
  Order Other(const Order& order) {
    Order other = order;
    while (other == order) {
      if (Below(2) == 0) {
        std::shuffle(other.begin(), other.end(), generator_);
      } else {  // a call is left out
        other.erase(other.begin() + Below(kCalls));
        other.push_back(Below(kPrograms));
      }
    }
    return other;
  }

 private:
  std::mt19937 generator_{7};  // NOLINT(bugprone-random-generator-seed): a run can be repeated
};

// With the start, or after it.
size_t NumBytes(Draw& draw) { return draw.Below(2) == 0 ? 8 : 5'000; }

TEST(InterleavingTest, OrdersThatDifferAreRefusedBeforeAnythingArrives) {
  Draw draw;
  for (int i = 0; i < kOrders; ++i) {
    const Order first = draw.Programs();
    const Order second = draw.Other(first);
    Job job(kTransports.at(static_cast<size_t>(draw.Below(int{kTransports.size()}))));
    bool is_refused = false;
    for (size_t call = 0; call < kCalls; ++call) {
      const std::array programs = {first[call], second[call]};
      const size_t num_bytes = NumBytes(draw);
      const auto calls = job.Start(programs, num_bytes, draw.Below(2));
      if (is_refused) {
        ExpectFailed(calls);
      } else if (programs[0] == programs[1]) {
        ExpectDelivered(calls, num_bytes);
      } else {
        ExpectRefused(calls, programs);
        is_refused = true;
      }
    }
    EXPECT_TRUE(is_refused);
  }
}

TEST(InterleavingTest, OrdersThatAreEqualDeliver) {
  Draw draw;
  for (const std::string_view transport : kTransports) {
    SCOPED_TRACE(transport);
    Job job(transport);
    for (int i = 0; i < kOrders; ++i) {
      for (const int program : draw.Programs()) {
        const size_t num_bytes = NumBytes(draw);
        ExpectDelivered(job.Start({program, program}, num_bytes, draw.Below(2)), num_bytes);
      }
    }
  }
}

}  // namespace
}  // namespace jaxhet::testing
