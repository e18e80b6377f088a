#include <unistd.h>

#include <array>
#include <thread>

#include "tests/cpp/testing.h"
#include "tests/cpp/world.h"

// A peer that talks nonsense.
namespace jaxhet::testing {
namespace {

// Process 1, played by the test: it introduces itself well and then says what the test wants.
class Liar {
 public:
  Liar() {
    auto ends = ConnectAll(2, 1);
    data = std::move(ends[1][0].data[0]);
    channel.emplace(std::move(ends[1][0].control));
    const WorldOptions options = FaultOptions("tcp");
    engine = MakeEngine(0, options, std::move(ends[0]));
    const HelloInfo info{1};
    const std::string table = PackStrings(std::array<std::string, 3>{"tcp", "ok", ""});
    const std::array body = {ObjectIovec(info), ToIovec(table.data(), table.size())};
    channel->Send(MessageType::kHello, body);
    channel->Send(MessageType::kVerdict, table);
    SetUp(*engine, options);
  }
  ~Liar() { engine->Close(std::chrono::milliseconds(100)); }
  Liar(const Liar&) = delete;
  Liar& operator=(const Liar&) = delete;

  void SendPlan() {
    const std::string text = PlanText(8);
    SendPlan({.plan = kPlan, .text_bytes = text.size()}, text);
  }
  void SendPlan(const PlanInfo& info, std::string_view texts) {
    channel->Send(MessageType::kPlan,
                  std::array{ObjectIovec(info), ToIovec(texts.data(), texts.size())});
  }
  void SendStart(const StartInfo& info, std::string_view tail = {}) {
    channel->Send(MessageType::kStart,
                  std::array{ObjectIovec(info), ToIovec(tail.data(), tail.size())});
  }
  // The same that rank 0 waits for after Gather(…, 0, num_bytes).
  static StartInfo Start(uint64_t num_bytes) {
    return {.communicator = CommunicatorId(std::array{0, 1}),
            .run = 1,
            .plan = kPlan,
            .index = 0,
            .sequence = 0,
            .kind = static_cast<int64_t>(ExchangeKind::kAllGather),
            .source = 1,
            .destination = 0,
            .send_bytes = num_bytes,
            .receive_bytes = num_bytes,
            .ticket = 1,
            .eager = 0};
  }
  void ExpectRefusal(std::string_view words, const Location& location = Location::current()) const {
    const auto error = engine->WaitFailure(kLong);
    if (error == nullptr) return AddFailure("no error", location);
    ExpectContains(error->what(), "jaxhet.TransportError: [", location);
    ExpectContains(error->what(), "process 1 (host 1)", location);
    ExpectContains(error->what(), words, location);
  }

  std::optional<ControlChannel> channel;
  Fd data;
  std::unique_ptr<Engine> engine;
};

TEST(RefusesStartWithoutPlan) {
  Liar liar;
  liar.SendStart(Liar::Start(8));
  liar.ExpectRefusal("a plan that it never sent");
}

TEST(RefusesStartTwice) {
  Liar liar;
  liar.SendPlan();
  liar.SendStart(Liar::Start(8'000));
  liar.SendStart(Liar::Start(8'000));
  liar.ExpectRefusal("started the same exchange twice");
}

TEST(RefusesCutMessages) {
  for (const auto type : {MessageType::kPlan, MessageType::kStart, MessageType::kFail}) {
    Liar liar;
    liar.channel->Send(type, "cut");
    liar.ExpectRefusal("a message is cut");
  }
}

TEST(RefusesPlansThatAreLongerThanTheirMessage) {
  for (const uint64_t text_bytes : {uint64_t{6}, uint64_t{1} << 40, UINT64_MAX}) {
    Liar liar;
    liar.SendPlan({.plan = kPlan, .text_bytes = text_bytes}, "five.");
    liar.ExpectRefusal("a message is cut");
  }
}

TEST(TakesPlansOfAnyLength) {
  Liar liar;
  liar.SendPlan({.plan = 30, .text_bytes = 0}, "");
  liar.SendPlan({.plan = 31, .text_bytes = 0}, "five.");
  liar.SendPlan({.plan = 32, .text_bytes = 4}, "five.");
  liar.SendPlan({.plan = 33, .text_bytes = 5}, "five.");
  const auto found = [&](int64_t plan) {
    return liar.engine->Read([&](const Core& core) {
      const Plan* const theirs = core.PlansOf(1).Find(plan);
      return theirs == nullptr ? "none" : StrCat(theirs->text, "|", theirs->program);
    });
  };
  const Time limit = Clock::now() + kLong;
  while (found(33) == "none" && Clock::now() < limit) std::this_thread::yield();
  ExpectEqual(found(30), std::string("|"));
  ExpectEqual(found(31), std::string("|five."));
  ExpectEqual(found(32), std::string("five|."));
  ExpectEqual(found(33), std::string("five.|"));
}

TEST(RefusesSecondIntroduction) {
  Liar liar;
  liar.channel->Send(MessageType::kHello);
  liar.ExpectRefusal("it introduced itself twice");
}

TEST(RefusesMissingEagerBytes) {
  Liar liar;
  liar.SendPlan();
  StartInfo start = Liar::Start(8);
  start.eager = 1;
  liar.SendStart(start, "seven..");
  const auto error = Gather(*liar.engine, 0, 8);
  EXPECT(error.has_value());
  ExpectContains(error->what(), "eager bytes are missing");
}

TEST(RefusesChunksOutOfPlace) {
  struct Chunk {
    uint32_t magic = 0x3143'584a;
    uint32_t reserved = 0;
    uint64_t ticket = 2;  // of rank 0's transfer with rank 1
    uint64_t offset = 0;
    uint64_t num_bytes = 4'000;
  };
  const auto refusal = [&](const auto& wrong, std::string_view words) {
    Liar liar;
    liar.SendPlan();
    Call call(GatherRequest(0), {4'000}, {8'000});
    call.StartOn(*liar.engine);
    const auto started = [](const Core& core) { return core.Stats().at("exchanges_started"); };
    while (liar.engine->Read(started) == 0) std::this_thread::yield();
    liar.SendStart(Liar::Start(4'000));
    EXPECT(write(liar.data.get(), &wrong, sizeof wrong) == sizeof wrong);
    liar.ExpectRefusal(words);
    EXPECT(call.Wait().has_value());
  };
  Chunk wrong;
  wrong.ticket = 77;
  refusal(wrong, "the transfer 77, which is not open");
  wrong = Chunk();
  wrong.offset = SIZE_MAX - 10;
  refusal(wrong, "lies outside of the transfer");
  wrong = Chunk();
  wrong.num_bytes = 4'001;
  refusal(wrong, "lies outside of the transfer");
  wrong = Chunk();
  wrong.magic = 5;
  refusal(wrong, "not with JXC1");
}

}  // namespace
}  // namespace jaxhet::testing
