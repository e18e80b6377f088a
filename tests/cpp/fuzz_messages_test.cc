#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tests/cpp/fuzz.h"
#include "tests/cpp/testing.h"
#include "tests/cpp/world.h"
#include "xla_plugin/base/error.h"
#include "xla_plugin/engine/progress_engine.h"

// Fuzzers of a peer's messages on the control connection, and of the chunks of `socket`.
namespace jaxhet::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

Options SmallChunks() {
  Options options = EngineOptions();
  options.chunk_bytes = 4 << 10;
  return options;
}

std::string Framed(uint32_t type, std::string_view body) {
  return BytesOf(MessageInfo{kMessageMagic, type, body.size()}).append(body);
}

std::string HelloBody(const std::vector<std::string>& table) {
  return BytesOf(HelloInfo{1}).append(PackStrings(table));
}

// --- introductions ---

// The two messages of an introduction, the second one unless it is empty; then any bytes.
std::string Introduction(std::string_view hello, std::string_view reply) {
  return Sized(hello).append(Sized(reply));
}

std::vector<std::string> HelloSeeds() {
  const std::vector<std::string> all = {"process_vm", "refused", "why", "verbs", "refused",
                                        "why",        "socket",  "ok",  ""};
  const std::string fail = BytesOf(FailInfo{ErrorCode::kPeer, 1}).append("smoke");
  return {Introduction(HelloBody({"socket", "ok", ""}), PackStrings(all)),
          Introduction(HelloBody(all), PackStrings(all)),
          Introduction(HelloBody({"process_vm", "ok", std::string(48, 'x'), "socket", "ok", ""}),
                       PackStrings(all)),
          Introduction(HelloBody({"socket", "refused", "why"}), PackStrings(all)) +
              Sized(Framed(MessageType::kFail, fail)),
          Introduction(HelloBody({"socket", "refused", "why"}), PackStrings(all)),
          Introduction(HelloBody(all), ""),
          // A string longer than its table.
          Introduction(HelloBody({}).append(8, '\xff'), PackStrings(all))};
}

PeerSpec PeerOf(Fd control, Fd data) {
  PeerSpec peer{.process = 1,
                .description = "host 1",
                .control = std::move(control),
                .data = {},
                .same_host = true,
                .transports = {"process_vm", "socket"},
                .device_transports = {},
                .refused = {},
                .keys = {}};
  peer.data.push_back(std::move(data));
  return peer;
}

void Introduce(std::string_view input) {
  auto [control, peer_control] = UnixPair();
  auto [data, peer_data] = UnixPair();
  InputReader reader(input);
  WriteSome(peer_control, Framed(MessageType::kHello, reader.TakeSized()));
  const std::string_view reply = reader.TakeSized();
  if (!reply.empty()) WriteSome(peer_control, Framed(MessageType::kHelloReply, reply));
  WriteSome(peer_control, reader.TakeSized());
  shutdown(peer_control.get(), SHUT_WR);
  ProgressEngine progress(0, 2, SmallChunks());
  JoinPeer(progress, PeerOf(std::move(control), std::move(data)));
}

[[maybe_unused]] const bool added_hello =
    AddFuzzer({.name = "hello",
               .covers = {"xla_plugin/engine/control/negotiation.cc"},
               .seeds = &HelloSeeds,
               .run = &Introduce});

// --- a job of two processes, of which the other one is the input ---

struct ChunkInfo {
  uint32_t magic = 0x3143'584a;
  uint32_t reserved = 0;
  uint64_t ticket = 2;
  uint64_t offset = 0;
  uint64_t num_bytes = 4'000;
};

constexpr char kTheirs = 'A';
constexpr std::byte kHole{0xEE};

// Kind of the next step in the input.
enum class Step : uint8_t { kMessage, kBytes, kOwnStart, kChunk, kPass, kStart, kCount };

std::string MessageStep(uint32_t type, std::string_view body) {
  return BytesOf(Step::kMessage).append(BytesOf(static_cast<uint8_t>(type))).append(Sized(body));
}
std::string PlanStep(int64_t plan, std::string_view text) {
  return MessageStep(MessageType::kPlan, BytesOf(PlanInfo{plan, text.size()}).append(text));
}
std::string OwnStartStep(uint16_t num_bytes) {
  return BytesOf(Step::kOwnStart).append(BytesOf(num_bytes));
}
std::string ChunkStep(const ChunkInfo& chunk, uint16_t num_bytes) {
  return BytesOf(Step::kChunk).append(BytesOf(chunk)).append(BytesOf(num_bytes));
}
std::string StartStep(const StartInfo& info, uint16_t tail_bytes) {
  return BytesOf(Step::kStart).append(BytesOf(info)).append(BytesOf(tail_bytes));
}
std::string PassStep() { return BytesOf(Step::kPass); }

std::vector<std::string> SoundJobs() {
  const std::string plan = PlanStep(kPlan, PlanText(8));
  const std::string start = StartStep(GatherStart(8'000), 0);
  const std::string chunks = ChunkStep({}, 4'000) + ChunkStep({.offset = 4'000}, 4'000);
  const std::string fail = BytesOf(FailInfo{ErrorCode::kDevice, 1}).append("smoke");
  return {
      plan + OwnStartStep(8'000) + start + chunks + PassStep(),
      plan + start + OwnStartStep(8'000) + PassStep() + chunks,
      plan + OwnStartStep(500) + StartStep(GatherStart(500, 1), 500) + PassStep(),
      plan + PlanStep(99, "other\top\n") + OwnStartStep(8) + MessageStep(MessageType::kFail, fail),
      plan + MessageStep(MessageType::kDeviceChannel, std::string(12, '\0')) +
          MessageStep(MessageType::kTransport, "x") + MessageStep(MessageType::kGoodbye, "")};
}

struct Attack {
  std::string input;
  std::string words;  // part of the text of the error
};

std::string CutPlanStep(uint64_t text_bytes) {
  return MessageStep(MessageType::kPlan, BytesOf(PlanInfo{kPlan, text_bytes}).append("five."));
}

// Messages in a wrong place, or of a wrong length.
std::vector<Attack> WrongMessages() {
  const std::string plan = PlanStep(kPlan, PlanText(8));
  const std::string start = StartStep(GatherStart(8'000), 0);
  std::vector<Attack> attacks = {
      {StartStep(GatherStart(8), 0), "a plan that it never sent"},
      {plan + start + start, "started the same exchange twice"},
      {plan + plan, "sent the plan 7 twice"},
      {plan + OwnStartStep(8) + StartStep(GatherStart(8, /*eager=*/1), 7),
       "eager bytes are missing"},
      {MessageStep(MessageType::kHello, ""), "it introduced itself twice"},
      {MessageStep(MessageType::kGoodbye, "") + MessageStep(MessageType::kHeartbeat, ""),
       "has left the job and still sends messages"},
      {BytesOf(Step::kBytes) + Sized(std::string(24, 'x')), "what arrived is not a"},
      {BytesOf(Step::kBytes) +
           Sized(BytesOf(MessageInfo{kMessageMagic + 1, MessageType::kHeartbeat, 0})),
       "what arrived is not a"}};
  attacks.push_back({BytesOf(Step::kBytes) +
                         Sized(BytesOf(MessageInfo{kMessageMagic, MessageType::kFail, UINT64_MAX})),
                     "what arrived is not a"});
  attacks.push_back({MessageStep(MessageType::kFail, std::string(8, '\xff')),
                     "a failure of an unknown kind is reported"});
  for (const auto type : {MessageType::kPlan, MessageType::kStart, MessageType::kFail}) {
    attacks.push_back({MessageStep(type, "cut"), "a message is cut"});
  }
  for (const uint64_t text_bytes : {uint64_t{6}, uint64_t{1} << 40, UINT64_MAX}) {
    attacks.push_back({CutPlanStep(text_bytes), "a message is cut"});
  }
  for (const auto type : {MessageType::kHeartbeat, MessageType::kGoodbye}) {
    attacks.push_back({MessageStep(type, "more"), "a message is 4 bytes too long"});
  }
  for (const int failed_process : {-1, 2}) {
    const FailInfo info{ErrorCode::kDevice, failed_process};
    attacks.push_back({MessageStep(MessageType::kFail, BytesOf(info).append("smoke")),
                       "which does not exist: smoke"});
  }
  return attacks;
}

// Starts with one wrong field each. Our rank waits for them, or has not come to the exchange.
std::vector<Attack> WrongStarts() {
  const std::string plan = PlanStep(kPlan, PlanText(8));
  std::vector<Attack> attacks;
  const auto add = [&](std::string_view words, auto change) {
    StartInfo start = GatherStart(8'000);
    change(start);
    for (const std::string& own : {std::string(), OwnStartStep(8'000) + PassStep()}) {
      attacks.push_back({plan + own + StartStep(start, 0), std::string(words)});
    }
  };
  add("in run 0", [](StartInfo& start) { start.run = 0; });
  add("in run -1", [](StartInfo& start) { start.run = -1; });
  add("exchange 8", [](StartInfo& start) { start.index = 8; });
  add("exchange ", [](StartInfo& start) { start.index = int64_t{1} << 62; });
  add("exchange -1", [](StartInfo& start) { start.index = -1; });
  add("with the sequence -1", [](StartInfo& start) { start.sequence = -1; });
  add("a plan that it never sent", [](StartInfo& start) { start.plan = 99; });
  add("speaks for rank 0", [](StartInfo& start) { start.source = 0; });
  add("speaks for rank -5", [](StartInfo& start) { start.source = -5; });
  add("speaks for rank", [](StartInfo& start) { start.source = 1 << 30; });
  add("started an exchange with rank 1, which is not of this process",
      [](StartInfo& start) { start.destination = 1; });
  add("with rank -7", [](StartInfo& start) { start.destination = -7; });
  return attacks;
}

std::vector<Attack> WrongChunks() {
  const std::string before =
      PlanStep(kPlan, PlanText(8)) + OwnStartStep(8'000) + StartStep(GatherStart(8'000), 0);
  std::vector<Attack> attacks = {
      {before + ChunkStep({}, 4'000) + ChunkStep({}, 4'000), "sent bytes of a transfer twice"}};
  const auto add = [&](const ChunkInfo& chunk, std::string_view words) {
    attacks.push_back({before + ChunkStep(chunk, 4'000), std::string(words)});
  };
  add({.ticket = 77}, "the transfer 77, which is not open");
  add({.offset = SIZE_MAX - 10}, "lies outside of the transfer");
  add({.num_bytes = 8'001}, "lies outside of the transfer");
  add({.magic = 5}, "not with JXC1");
  return attacks;
}

std::vector<Attack> Attacks() {
  std::vector<Attack> attacks = WrongMessages();
  std::ranges::move(WrongStarts(), std::back_inserter(attacks));
  std::ranges::move(WrongChunks(), std::back_inserter(attacks));
  return attacks;
}

std::vector<std::string> JobSeeds() {
  std::vector<std::string> seeds = SoundJobs();
  for (Attack& attack : Attacks()) seeds.push_back(std::move(attack.input));
  return seeds;
}

// An exchange of rank 0, and its memory.
struct OwnExchange {
  std::vector<std::byte> operand;
  std::vector<std::byte> result;
};

class Job {
 public:
  explicit Job(bool knows_ranks = true) {
    auto [control, peer_control] = UnixPair();
    auto [data, peer_data] = UnixPair();
    control_ = std::move(peer_control);
    data_ = std::move(peer_data);
    WriteSome(control_, Framed(MessageType::kHello, HelloBody({"socket", "ok", ""})));
    WriteSome(control_, Framed(MessageType::kHelloReply,
                               PackStrings(std::vector<std::string>{"socket", "ok", ""})));
    pollables_ = JoinPeer(progress_, PeerOf(std::move(control), std::move(data)));
    if (knows_ranks) progress_.SetRanks(RanksOf({}));
    progress_.AddPlan(kPlan, PlanText(8), "");
  }

  void Play(InputReader& input) {
    switch (static_cast<Step>(input.Take<uint8_t>() % static_cast<uint8_t>(Step::kCount))) {
      case Step::kMessage: {
        const uint32_t type = input.Take<uint8_t>();
        return WriteSome(control_, Framed(type, input.TakeSized()));
      }
      case Step::kBytes:
        return WriteSome(control_, input.TakeSized());
      case Step::kOwnStart:
        return Start(input.Take<uint16_t>());
      case Step::kChunk: {
        const auto chunk = input.Take<ChunkInfo>();
        return WriteSome(data_, BytesOf(chunk).append(input.Take<uint16_t>(), kTheirs));
      }
      case Step::kStart: {
        const auto info = input.Take<StartInfo>();
        return WriteSome(control_, Framed(MessageType::kStart,
                                          BytesOf(info).append(input.Take<uint16_t>(), kTheirs)));
      }
      default:
        return Pass();
    }
  }

  void Pass() {
    for (int i = 0; i < 3; ++i) {
      for (Pollable* const pollable : pollables_) pollable->OnEvents(EPOLLIN | EPOLLOUT);
      progress_.Pass();
      Drain(control_);
      Drain(data_);
    }
    for (const Completion& completion : progress_.TakeCompletions()) {
      if (completion.error != nullptr) continue;
      ExpectNoHole(exchanges_.at(completion.id));
      ++num_completed_;
    }
  }

  size_t num_completed() const { return num_completed_; }
  ProgressEngine& progress() { return progress_; }
  // Throws the failure, if there is one.
  void End() {
    Pass();
    if (const auto failure = progress_.failure()) throw Error(*failure);
  }

 private:
  void Start(size_t num_bytes) {
    const auto id = static_cast<int64_t>(exchanges_.size()) + 1;
    OwnExchange& exchange = exchanges_[id];
    exchange.operand.assign(num_bytes, std::byte{1});
    exchange.result.assign(2 * num_bytes, kHole);
    ExchangeRequest request = GatherRequest(0, id);
    request.operands.emplace_back(exchange.operand);
    request.results.emplace_back(exchange.result);
    progress_.Start(std::move(request), id);
    progress_.ServeOwn();
  }

  static void ExpectNoHole(const OwnExchange& exchange) {
    EXPECT_EQ(std::ranges::count(exchange.result, kHole), 0);
  }

  std::map<int64_t, OwnExchange> exchanges_;  // by id; outlive the engine
  size_t num_completed_ = 0;
  Fd control_;
  Fd data_;
  ProgressEngine progress_{0, 2, SmallChunks()};
  std::set<Pollable*> pollables_;
};

// Returns the number of exchanges that have succeeded.
size_t PlayJob(std::string_view input) {
  Job job;
  InputReader reader(input);
  for (int steps = 0; !reader.empty() && steps < 64; ++steps) job.Play(reader);
  job.End();
  return job.num_completed();
}

// Without jobs that succeed the fuzzer would see nothing but refusals.
TEST(FuzzMessagesTest, SoundJobsSucceed) {
  const std::vector<std::string> jobs = SoundJobs();
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(PlayJob(jobs[i]), size_t{1});
}

TEST(FuzzMessagesTest, AttacksAreRefused) {
  for (const auto& [input, words] : Attacks()) {
    EXPECT_THAT(ThrownText([&] { PlayJob(input); }),
                AllOf(HasSubstr("jaxhet.TransportError: ["), HasSubstr("process 1 (host 1)"),
                      HasSubstr(words)));
  }
}

TEST(FuzzMessagesTest, TableOfTransportsThatIsCutIsRefused) {
  EXPECT_THAT(ThrownText([] { Introduce(Introduction(HelloBody({"socket", "ok"}), "")); }),
              HasSubstr("process 1 (host 1): its table of transports has 2 entries"));
}

TEST(FuzzMessagesTest, ChunksArriveInAnyOrder) {
  std::string input =
      PlanStep(kPlan, PlanText(8)) + OwnStartStep(8'000) + StartStep(GatherStart(8'000), 0);
  for (const uint64_t offset : {6'000U, 0U, 4'000U, 2'000U}) {
    input += ChunkStep({.offset = offset, .num_bytes = 2'000}, 2'000) + PassStep();
  }
  EXPECT_EQ(PlayJob(input), size_t{1});
}

TEST(FuzzMessagesTest, PlansOfAnyLengthAreTaken) {
  Job job;
  const auto found = [&](int64_t plan, uint64_t text_bytes, std::string_view texts) {
    const std::string input =
        MessageStep(MessageType::kPlan, BytesOf(PlanInfo{plan, text_bytes}).append(texts));
    InputReader reader(input);
    job.Play(reader);
    job.End();
    const Plan* const theirs = job.progress().peers().PlansOf(1).Find(plan);
    return theirs == nullptr ? "none" : StrCat(theirs->text, "|", theirs->program);
  };
  EXPECT_EQ(found(30, 0, ""), "|");
  EXPECT_EQ(found(31, 0, "five."), "|five.");
  EXPECT_EQ(found(32, 4, "five."), "five|.");
  EXPECT_EQ(found(33, 5, "five."), "five.|");
}

// A peer may be ahead: its starts are looked at when the ranks are known.
TEST(FuzzMessagesTest, ForeignRanksThatCameBeforeTheRanksAreRefused) {
  Job job(/*knows_ranks=*/false);
  StartInfo start = GatherStart(4'000);
  start.source = 0;
  const std::string input = PlanStep(kPlan, PlanText(8)) + StartStep(start, 0);
  for (InputReader reader(input); !reader.empty();) job.Play(reader);
  job.End();
  job.progress().SetRanks(RanksOf({}));
  EXPECT_THAT(ThrownText([&] { job.End(); }), HasSubstr("speaks for rank 0"));
}

[[maybe_unused]] const bool added_job = AddFuzzer(
    {.name = "job",
     .covers = {"xla_plugin/net/socket/socket.cc", "xla_plugin/engine/common/wire.cc",
                "xla_plugin/engine/common/wire.h", "xla_plugin/base/checked.h",
                "xla_plugin/engine/progress_engine.cc", "xla_plugin/engine/host/open_exchanges.cc",
                "xla_plugin/engine/control/peer_table.h", "xla_plugin/engine/common/plans.cc",
                "xla_plugin/net/socket/socket_connection.cc"},
     .seeds = &JobSeeds,
     .run = [](std::string_view input) { (void)PlayJob(input); }});

}  // namespace
}  // namespace jaxhet::testing
