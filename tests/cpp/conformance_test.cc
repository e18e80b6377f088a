#include <algorithm>
#include <deque>
#include <map>
#include <thread>

#include "tests/cpp/testing.h"
#include "tests/cpp/world.h"

// Requirements on every transport, tested on each.
namespace jaxhet::testing {
namespace {

using ::testing::HasSubstr;

struct NamedWorld {
  std::string name;
  WorldOptions options;
};

void PrintTo(const NamedWorld& world, std::ostream* out) { *out << world.name; }

// Tests of every transport.
class ConformanceTest : public ::testing::TestWithParam<NamedWorld> {};
// Tests that encrypted transports pass as well.
class BytesTest : public ::testing::TestWithParam<NamedWorld> {};

using Sizes = std::vector<size_t>;

std::vector<int> AllRanks(int num_ranks) {
  std::vector<int> ranks;
  for (int rank = 0; rank < num_ranks; ++rank) ranks.push_back(rank);
  return ranks;
}

ExchangeRequest Request(ExchangeKind kind, int rank, std::vector<int> group, int64_t run_id = 1,
                        int64_t index = 0) {
  ExchangeRequest request;
  request.rank = rank;
  request.run_id = run_id;
  request.kind = kind;
  request.plan = kPlan;
  request.index = index;
  request.group = std::move(group);
  return request;
}

using Bytes = std::vector<std::byte>;

// The result of the member at `position`, by the definition in exchange.h.
Bytes Expected(ExchangeKind kind, const std::vector<Bytes>& operands, size_t position,
               size_t result_bytes) {
  Bytes expected;
  const size_t block = result_bytes / operands.size();
  for (size_t i = 0; i < operands.size(); ++i) {
    const std::span operand = operands[i];
    if (kind == ExchangeKind::kAllGather) {
      expected.insert(expected.end(), operand.begin(), operand.end());
    } else {  // zeros follow an operand
      const size_t begin = std::min(operand.size(), position * block);
      const auto share = operand.subspan(begin, std::min(block, operand.size() - begin));
      expected.insert(expected.end(), share.begin(), share.end());
      expected.resize((i + 1) * block);
    }
  }
  expected.resize(result_bytes);
  return expected;
}

// All members of `group` start; every byte of every result is checked.
void CheckExchange(World& world, ExchangeKind kind, const std::vector<int>& group,
                   const Sizes& operand_bytes, const Sizes& result_bytes, int64_t run_id) {
  std::deque<Call> calls;
  for (const int rank : group) {
    calls.emplace_back(Request(kind, rank, group, run_id), operand_bytes, result_bytes);
    calls.back().StartOn(world.EngineOf(rank));
  }
  for (Call& call : calls) {
    const auto error = call.Wait();
    EXPECT_FALSE(error) << (error ? error->what() : "");
  }
  for (size_t i = 0; i < operand_bytes.size(); ++i) {
    std::vector<Bytes> operands;
    for (const Call& call : calls) operands.push_back(call.operands[i]);
    for (size_t position = 0; position < group.size(); ++position) {
      EXPECT_TRUE(AreEqual(calls[position].results[i],
                           Expected(kind, operands, position, result_bytes[i])));
    }
  }
}

Sizes SizesOf(const Options& options) {
  const auto eager = static_cast<size_t>(options.eager_bytes);
  const auto chunk = static_cast<size_t>(options.chunk_bytes);
  if (kIsThreadSanitized) return {0, 7, eager + 1, chunk + 1};
  return {0, 1, 7, eager - 1, eager, eager + 1, chunk - 1, chunk, chunk + 1, (size_t{3} << 20) + 5};
}

TEST_P(BytesTest, GathersAllSizes) {
  World world(GetParam().options);
  const auto group = AllRanks(world.num_ranks());
  int64_t run_id = 0;
  for (const size_t bytes : SizesOf(GetParam().options.engine)) {
    const size_t full = group.size() * bytes;
    CheckExchange(world, ExchangeKind::kAllGather, group, {bytes}, {full}, ++run_id);
    // Trimmed: in the last block, and so far that whole blocks are missing.
    if (bytes > 1)
      CheckExchange(world, ExchangeKind::kAllGather, group, {bytes}, {full - 1}, ++run_id);
    CheckExchange(world, ExchangeKind::kAllGather, group, {bytes}, {bytes / 2}, ++run_id);
  }
}

TEST_P(ConformanceTest, ExchangesAllToAllSizes) {
  World world(GetParam().options);
  const auto group = AllRanks(world.num_ranks());
  int64_t run_id = 0;
  for (const size_t block : SizesOf(GetParam().options.engine)) {
    const size_t full = group.size() * block;
    CheckExchange(world, ExchangeKind::kAllToAll, group, {full}, {full}, ++run_id);
    // Padded: in the last share, and so far that whole shares are missing.
    if (block > 1)
      CheckExchange(world, ExchangeKind::kAllToAll, group, {full - 1}, {full}, ++run_id);
    CheckExchange(world, ExchangeKind::kAllToAll, group, {full / 3}, {full}, ++run_id);
  }
}

// Each rank of the world starts a permute along `pairs`; every byte of every result is checked.
void CheckPermute(World& world, const std::vector<Pair>& pairs, size_t bytes, int64_t run_id) {
  std::deque<Call> calls;
  for (const int rank : AllRanks(world.num_ranks())) {
    ExchangeRequest request =
        Request(ExchangeKind::kPermute, rank, ConnectedTo(rank, pairs), run_id);
    request.pairs = pairs;
    calls.emplace_back(std::move(request), Sizes{bytes, 3}, Sizes{bytes, 3});
    calls.back().StartOn(world.EngineOf(rank));
  }
  for (Call& call : calls) {
    const auto error = call.Wait();
    EXPECT_FALSE(error) << (error ? error->what() : "");
  }
  std::map<int, int> source_of;
  for (const auto [source, target] : pairs) source_of[target] = source;
  for (int rank = 0; rank < world.num_ranks(); ++rank) {
    const auto source = source_of.find(rank);
    for (size_t i = 0; i < 2; ++i) {
      const Call& call = calls[static_cast<size_t>(rank)];
      const Bytes zeros(call.results[i].size());
      EXPECT_TRUE(
          AreEqual(call.results[i], source == source_of.end()
                                        ? zeros
                                        : calls[static_cast<size_t>(source->second)].operands[i]));
    }
  }
}

TEST_P(ConformanceTest, PermutesAlongAnyPairs) {
  World world(GetParam().options);
  const int last = world.num_ranks() - 1;
  std::vector<Pair> ring;
  std::vector<Pair> broadcast;
  for (int rank = 0; rank <= last; ++rank) {
    ring.push_back({rank, (rank + 1) % (last + 1)});
    broadcast.push_back({last, rank});
  }
  int64_t run_id = 0;
  for (const std::vector<Pair>& pairs :
       std::vector<std::vector<Pair>>{ring, broadcast, {{0, last}}, {{0, last}, {0, 0}}}) {
    for (const size_t bytes : SizesOf(GetParam().options.engine)) {
      CheckPermute(world, pairs, bytes, ++run_id);
    }
  }
}

TEST_P(BytesTest, ExchangesManyOperands) {
  World world(GetParam().options);
  const auto group = AllRanks(world.num_ranks());
  Sizes operand_bytes;
  Sizes result_bytes;
  for (size_t i = 0; i < 2'500; ++i) {  // more than an iovec call can take
    operand_bytes.push_back(i % 91);
    result_bytes.push_back(group.size() * (i % 91));
  }
  CheckExchange(world, ExchangeKind::kAllGather, group, operand_bytes, result_bytes, 1);
  CheckExchange(world, ExchangeKind::kAllToAll, group, operand_bytes, result_bytes, 2);
}

TEST_P(ConformanceTest, ExchangesInSubgroups) {
  World world(GetParam().options);
  const int last = world.num_ranks() - 1;
  int64_t run_id = 0;
  for (const std::vector<int>& group :
       std::vector<std::vector<int>>{{0}, {0, last}, {last, 0}, {last, 1, 0}}) {
    CheckExchange(world, ExchangeKind::kAllGather, group, {100'000}, {100'000 * group.size()},
                  ++run_id);
    CheckExchange(world, ExchangeKind::kAllToAll, group, {5, 70'000},
                  {5 * group.size(), 70'000 * group.size()}, ++run_id);
  }
}

// Many exchanges of one run are under way, started in another order on each rank.
TEST_P(ConformanceTest, ExchangesInAnyOrder) {
  World world(GetParam().options);
  const auto group = AllRanks(world.num_ranks());
  constexpr int64_t kExchanges = 23;  // prime: every stride reaches all
  constexpr int64_t kLongPlan = kPlan + 1;
  for (int process = 0; process < GetParam().options.num_processes; ++process) {
    world.engine(process).AddPlan(kLongPlan, PlanText(kExchanges));
  }
  std::map<std::pair<int, int64_t>, Call> calls;
  std::vector<std::thread> threads;
  const auto bytes = [](int64_t index) { return static_cast<size_t>(index * index * 1'000 + 3); };
  for (const int rank : group) {
    for (int64_t index = 0; index < kExchanges; ++index) {
      ExchangeRequest request = Request(ExchangeKind::kAllGather, rank, group, 1, index);
      request.plan = kLongPlan;
      calls.try_emplace({rank, index}, std::move(request), Sizes{bytes(index)},
                        Sizes{bytes(index) * group.size()});
    }
  }
  for (const int rank : group) {
    threads.emplace_back([&, rank] {
      for (int64_t i = 0; i < kExchanges; ++i) {
        calls.at({rank, (i * (2 * rank + 5)) % kExchanges}).StartOn(world.EngineOf(rank));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (auto& [key, call] : calls) {
    const auto error = call.Wait();
    EXPECT_FALSE(error) << (error ? error->what() : "");
    const size_t size = bytes(key.second);
    const std::span result = call.results[0];
    for (size_t i = 0; i < group.size(); ++i) {
      EXPECT_TRUE(AreEqual(result.subspan(i * size, size), Pattern(group[i], 0, size)));
    }
  }
}

// The same exchange in a loop of the program, many times; one rank runs ahead.
TEST_P(ConformanceTest, CountsSequences) {
  World world(GetParam().options);
  const auto group = AllRanks(world.num_ranks());
  constexpr int kTimes = 20;
  std::map<int, std::deque<Call>> calls;
  for (const int rank : group) {
    for (int i = 0; i < kTimes; ++i) {
      calls[rank].emplace_back(Request(ExchangeKind::kAllGather, rank, group), Sizes{2'000},
                               Sizes{2'000 * group.size()});
      calls[rank].back().operands[0][0] = static_cast<std::byte>(i);
      calls[rank].back().StartOn(world.EngineOf(rank));
    }
  }
  for (const int rank : group) {
    for (int i = 0; i < kTimes; ++i) {
      Call& call = calls[rank][static_cast<size_t>(i)];
      EXPECT_FALSE(call.Wait());
      for (size_t block = 0; block < group.size(); ++block) {
        EXPECT_EQ(static_cast<int>(call.results[0][block * 2'000]), i);
      }
    }
  }
}

struct Outcome {
  std::string first;
  std::string second;
};

// Rank 0 starts `first`, the last rank `second`; both fail.
Outcome BothFail(World& world, Call& first, Call& second) {
  first.StartOn(world.EngineOf(0));
  second.StartOn(world.EngineOf(world.num_ranks() - 1));
  const auto first_error = first.Wait();
  const auto second_error = second.Wait();
  EXPECT_TRUE(first_error.has_value());
  EXPECT_TRUE(second_error.has_value());
  if (!first_error || !second_error) return {};
  return {first_error->what(), second_error->what()};
}

TEST_P(ConformanceTest, RefusesOtherPlans) {
  World world(GetParam().options);
  const int last = world.num_ranks() - 1;
  world.EngineOf(last).AddPlan(8, PlanText(3, "another line"));
  ExchangeRequest other = Request(ExchangeKind::kAllGather, last, {0, last});
  other.plan = 8;
  Call first(Request(ExchangeKind::kAllGather, 0, {0, last}), {5'000}, {10'000});
  Call second(std::move(other), {5'000}, {10'000});
  const Outcome outcome = BothFail(world, first, second);
  for (const std::string& text : {outcome.first, outcome.second}) {
    EXPECT_THAT(text, HasSubstr("jaxhet.PlanMismatchError: [rank "));
    EXPECT_THAT(text, HasSubstr("line 2 (op 2)"));
    EXPECT_THAT(text, HasSubstr("another line (op 2)"));
  }
  // Nothing was delivered.
  EXPECT_TRUE(std::all_of(first.results[0].begin() + 5'000, first.results[0].end(),
                          [](std::byte byte) { return byte == std::byte{0xEE}; }));
}

TEST_P(ConformanceTest, RefusesOtherSizes) {
  World world(GetParam().options);
  const int last = world.num_ranks() - 1;
  Call first(Request(ExchangeKind::kAllGather, 0, {0, last}), {5'000}, {10'000});
  Call second(Request(ExchangeKind::kAllGather, last, {0, last}), {5'001}, {10'002});
  const Outcome outcome = BothFail(world, first, second);
  EXPECT_THAT(outcome.first, HasSubstr("PlanMismatchError"));
  EXPECT_THAT(outcome.second, HasSubstr("PlanMismatchError"));
}

// One rank goes on to its next run while the other still has an exchange of this one to come to.
TEST_P(ConformanceTest, RefusesSkippedExchanges) {
  World world(GetParam().options);
  const int last = world.num_ranks() - 1;
  const std::vector<int> group = {0, last};
  CheckExchange(world, ExchangeKind::kAllGather, group, {8}, {16}, 1);
  Call first(Request(ExchangeKind::kAllGather, 0, group, 1, 1), {8}, {16});
  Call second(Request(ExchangeKind::kAllGather, last, group, 2, 1), {8}, {16});
  const Outcome outcome = BothFail(world, first, second);
  EXPECT_THAT(outcome.first,
              HasSubstr("started exchange 1 (op 1), which this rank's program has passed"));
}

TEST_P(ConformanceTest, ReportsLateRanks) {
  World world(GetParam().options);
  const int last = world.num_ranks() - 1;
  const std::vector<int> group = {0, last};
  CheckExchange(world, ExchangeKind::kAllGather, group, {8}, {16}, 1);
  ExchangeRequest request = Request(ExchangeKind::kAllGather, 0, group, 2, 1);
  request.deadline_ms = 100;
  Call call(std::move(request), {8}, {16});
  call.StartOn(world.EngineOf(0));
  const auto error = call.Wait();
  ASSERT_TRUE(error && error->code() == ErrorCode::kDeadline);
  EXPECT_THAT(error->what(), HasSubstr("exchange 1 (op 1)"));
  EXPECT_THAT(error->what(), HasSubstr(StrCat("rank ", last, " of process ")));
  EXPECT_THAT(error->what(), HasSubstr("it last started exchange 0 (op 0)"));
  // The others learn the same.
  const auto theirs = world.EngineOf(last).WaitFailure(kLong);
  ASSERT_NE(theirs, nullptr);
  EXPECT_EQ(std::string(theirs->what()), std::string(error->what()));
}

TEST_P(BytesTest, CountsBytes) {
  World world(GetParam().options);
  const WorldOptions& options = GetParam().options;
  const auto group = AllRanks(world.num_ranks());
  CheckExchange(world, ExchangeKind::kAllGather, group, {100'000}, {100'000 * group.size()}, 1);
  const auto stats =
      world.engine(0).Read([](const ProgressEngine& progress) { return progress.Stats(); });
  EXPECT_EQ(stats.at("exchanges_completed"), static_cast<uint64_t>(options.ranks_per_process));
  const int pairs = (world.num_ranks() - options.ranks_per_process) * options.ranks_per_process;
  const auto remote = static_cast<uint64_t>(pairs);
  if (remote > 0) {
    const auto transport = world.engine(0).Read(
        [](const ProgressEngine& progress) { return progress.peers().Of(1).counts.transport; });
    EXPECT_EQ(transport, options.transports.front());
    EXPECT_EQ(stats.at("bytes_sent_" + transport), remote * 100'000);
    EXPECT_EQ(stats.at("bytes_received_" + transport), remote * 100'000);
  }
  const auto record = world.engine(0).Read(
      [](const ProgressEngine& progress) { return progress.flight_recorder().records().back(); });
  EXPECT_EQ(record.state, FlightState::kCompleted);
}

std::vector<NamedWorld> PlainWorlds() {
  return {
      {"local", {.num_processes = 1, .ranks_per_process = 4}},
      {"process_vm", {.num_processes = 3, .transports = {"process_vm"}}},
      {"process_vm_2x2",
       {.num_processes = 2, .ranks_per_process = 2, .transports = {"process_vm"}}},
      {"verbs", {.num_processes = 3, .transports = {"verbs"}}},
      {"verbs_2x2", {.num_processes = 2, .ranks_per_process = 2, .transports = {"verbs"}}},
      {"socket", {.num_processes = 3, .transports = {"socket"}}},
      {"socket_2x2", {.num_processes = 2, .ranks_per_process = 2, .transports = {"socket"}}},
  };
}

std::vector<NamedWorld> SealedWorlds() {
  std::vector<NamedWorld> worlds;
  for (const std::string encryption : {"auth", "full"}) {
    NamedWorld& world = worlds.emplace_back(
        "socket_" + encryption, WorldOptions{.num_processes = 3, .transports = {"socket"}});
    world.options.engine.encryption = encryption;
  }
  return worlds;
}

std::string NameOf(const ::testing::TestParamInfo<NamedWorld>& info) { return info.param.name; }

INSTANTIATE_TEST_SUITE_P(Plain, BytesTest, ::testing::ValuesIn(PlainWorlds()), &NameOf);
INSTANTIATE_TEST_SUITE_P(Sealed, BytesTest, ::testing::ValuesIn(SealedWorlds()), &NameOf);
INSTANTIATE_TEST_SUITE_P(Plain, ConformanceTest, ::testing::ValuesIn(PlainWorlds()), &NameOf);

}  // namespace
}  // namespace jaxhet::testing
