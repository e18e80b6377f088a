// Every kind of fault in every phase of a connection, at random: whatever happens, an exchange ends
// within the deadline, with the right bytes or with an error that says who, where, why and what to
// do.

#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/cpp/testing.h"
#include "tests/cpp/world.h"
#include "tests/softverbs/library/verbs_values.h"
#include "tests/softverbs/softverbs.h"

namespace jaxhet::testing {
namespace {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr uint32_t kNumRuns = 168;
#else
constexpr uint32_t kNumRuns = 1'092;
#endif
using softverbs::Fault;
using softverbs::FaultKind;
using softverbs::kAll;
using std::chrono::milliseconds;

constexpr int64_t kDeadlineMs = 20'000;

enum Phase : uint8_t { kConnect, kIdle, kFirstChunk, kMiddle, kLastChunk, kClose, kNumPhases };
constexpr std::array<const char*, kNumPhases> kPhaseNames = {"connect", "idle", "first",
                                                             "middle",  "last", "close"};

// Choices of a run.
struct Chance {
  std::mt19937 random;

  uint64_t Below(uint64_t end) {
    return std::uniform_int_distribution<uint64_t>(0, end - 1)(random);
  }
  bool Half() { return Below(2) == 0; }
  template <typename T, size_t kSize>
  const T& Of(const std::array<T, kSize>& values) {
    return values.at(Below(kSize));
  }
};

// A row of the table: a fault on send requests or calls, or a command that changes the hardware at
// once and is not counted.
struct FaultRow {
  const char* name;
  Fault (*fault)(Chance& chance) = nullptr;
  void (*command)(Chance& chance) = nullptr;
};

template <int kStatus>
Fault Failure(Chance& /*chance*/) {
  return {.number = kStatus};
}

milliseconds UpTo20(Chance& chance) { return milliseconds(chance.Below(20)); }

constexpr std::array kFaults = {
    FaultRow{"RETRY_EXC", Failure<ibv::kWcRetryExcErr>},
    FaultRow{"RNR_RETRY_EXC", Failure<ibv::kWcRnrRetryExcErr>},
    FaultRow{"WR_FLUSH", [](Chance&) -> Fault { return {.kind = FaultKind::kFlush}; }},
    FaultRow{"peer's WR_FLUSH", [](Chance&) -> Fault { return {.kind = FaultKind::kPeerFlush}; }},
    FaultRow{"lost acknowledgement",
             [](Chance&) -> Fault { return {.number = ibv::kWcRetryExcErr, .num_bytes = kAll}; }},
    FaultRow{"partial write",
             [](Chance& chance) -> Fault {
               return {.number = ibv::kWcRetryExcErr, .num_bytes = 1 + chance.Below(100'000)};
             }},
    FaultRow{"late requests",
             [](Chance& chance) -> Fault {
               return {.kind = FaultKind::kGhost, .delay = UpTo20(chance)};
             }},
    FaultRow{"delay",
             [](Chance& chance) -> Fault {
               return {.kind = FaultKind::kDelay, .delay = UpTo20(chance)};
             }},
    FaultRow{"reordered QPs", nullptr,
             [](Chance& chance) {
               const std::chrono::microseconds most(1 + chance.Below(500));
               Softverbs().SetJitter(most, static_cast<uint32_t>(1 + chance.Below(1'000)));
             }},
    FaultRow{"REM_ACCESS", Failure<ibv::kWcRemAccessErr>},
    FaultRow{"port down", nullptr,
             [](Chance& chance) { Softverbs().SetPort(chance.Below(2), false); }},
    FaultRow{"port flaps", nullptr,
             [](Chance& chance) {
               const size_t device = chance.Below(2);
               Softverbs().SetPort(device, false);
               Softverbs().SetPort(device, true);
             }},
    FaultRow{"GID removed", nullptr,
             [](Chance& chance) { Softverbs().SetGid(chance.Below(2), false); }},
    FaultRow{"refused call",
             [](Chance& chance) -> Fault {
               // Half of the calls move data.
               constexpr std::array kCalls = {"ibv_reg_mr",    "ibv_create_qp", "ibv_modify_qp",
                                              "ibv_create_cq", "ibv_post_send", "ibv_post_recv",
                                              "ibv_post_send", "ibv_post_recv"};
               constexpr std::array kErrors = {12 /*ENOMEM*/, 22 /*EINVAL*/, 110 /*ETIMEDOUT*/};
               return {.kind = FaultKind::kCall,
                       .number = chance.Of(kErrors),
                       .call = chance.Of(kCalls)};
             }},
};

void RepairAll() {
  Softverbs().Clear();
  for (const size_t device : {0U, 1U}) {
    Softverbs().SetPort(device, true);
    Softverbs().SetGid(device, true);
  }
}

// One run: a world, three exchanges, and a fault somewhere.
class FaultRun {
 public:
  FaultRun(uint32_t seed, const FaultRow& fault, Phase phase)
      : chance_{std::mt19937(seed)}, fault_(fault), phase_(phase) {}

  // Whether the fault happened.
  bool Execute() {
    const WorldOptions options = ChooseOptions();
    const uint64_t struck_before = Softverbs().num_faults_fired();
    if (phase_ == kConnect) Strike(0);
    {
      World world(options);
      MoveBytes(world);
    }
    RepairAll();
    return is_on_ || Softverbs().num_faults_fired() > struck_before;
  }

  const std::string& problems() const { return problems_; }
  std::string ToString() const {
    return StrCat(fault_.name, " in phase ", kPhaseNames.at(phase_), ": ", num_bytes_, " bytes");
  }

 private:
  WorldOptions ChooseOptions() {
    WorldOptions options{.transports = {"verbs", "socket"}};
    Options& engine = options.engine;
    engine.deadline_ms = engine.first_deadline_ms = kDeadlineMs;
    engine.peer_timeout_ms = kDeadlineMs;
    engine.chunk_bytes = chance_.Of(std::array<int64_t, 3>{4'096, 65'536, 200'000});
    engine.eager_bytes = 0;
    engine.verbs.qps = 1 + static_cast<int64_t>(chance_.Below(3));
    engine.verbs.depth = 1 + static_cast<int64_t>(chance_.Below(8));
    if (chance_.Below(3) == 0) engine.verbs.devices = "soft0";
    const auto chunk = static_cast<size_t>(engine.chunk_bytes);
    num_bytes_ =
        chance_.Of(std::array<size_t, 7>{1, 7, chunk - 1, chunk + 1, 100'003, 300'000, 600'001});
    return options;
  }

  void MoveBytes(World& world) {
    const uint64_t before = Softverbs().num_requests();
    Gather(world);
    const uint64_t num_requests = Softverbs().num_requests() - before;
    switch (phase_) {
      case kConnect:
        break;
      case kIdle:
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        Strike(0);
        break;
      case kFirstChunk:
        Strike(0);
        break;
      case kMiddle:
        Strike(num_requests / 4 + chance_.Below(num_requests / 2 + 1));
        break;
      default:
        // The requests behind the last chunk are credits.
        Strike(num_requests - std::min(num_requests, 1 + chance_.Below(6)));
    }
    Gather(world);
    if (phase_ == kClose) return;
    if (fault_.fault != nullptr) Softverbs().Clear();
    Gather(world);
  }

  // The fault strikes after `after` more send requests, or at once.
  void Strike(uint64_t after) {
    is_on_ = fault_.command != nullptr;
    if (is_on_) return fault_.command(chance_);
    Fault fault = fault_.fault(chance_);
    fault.after = after;
    fault.count = 1 + chance_.Below(3);
    Softverbs().Add(fault);
  }

  void Gather(World& world) {
    for (const auto& error : GatherBoth(world, num_bytes_, run_id_++)) {
      if (error) CheckError(*error);
    }
  }

  void CheckError(const Error& error) {
    const std::string_view text = error.what();
    const auto has = [&](auto... words) {
      return ((text.find(words) != std::string_view::npos) || ...);
    };
    const auto expect = [&](bool condition, std::string_view what) {
      if (!condition) problems_ += StrCat(what, ": ", text, "; ");
    };
    if (error.text() == kWrongBytes) return expect(false, "a result");
    expect(error.code() == ErrorCode::kPeer || error.code() == ErrorCode::kTransport, "wrong type");
    // Between exchanges there is none, and the processes are named.
    expect(has("rank 0", "rank 1", "process 0 (host 0)", "process 1 (host 1)"), "no rank");
    expect(has("soft0:1", "soft1:1"), "no NIC");
    expect(has("(status ", "ibv_", "port"), "no cause");
    expect(has("JAXHET_VERBS_", "please report it"), "no advice");
  }

  Chance chance_;
  const FaultRow& fault_;
  const Phase phase_;
  size_t num_bytes_ = 0;
  int64_t run_id_ = 1;
  bool is_on_ = false;
  std::string problems_;
};

TEST(FaultMatrixTest, EveryFaultInEveryPhase) {
  const char* const given = std::getenv("FAULT_MATRIX_SEED");
  const auto first_seed = static_cast<uint32_t>(given == nullptr ? 1 : std::stoul(given));
  std::fprintf(stderr, "%u runs, seeds from %u (FAULT_MATRIX_SEED)\n", kNumRuns, first_seed);
  Softverbs().SetRetryInterval(std::chrono::microseconds(500));
  const int64_t objects = Softverbs().num_objects();
  std::array<std::array<int, kNumPhases>, kFaults.size()> struck{};
  for (uint32_t i = 0; i < kNumRuns; ++i) {
    const size_t row = i / kNumPhases % kFaults.size();
    const size_t phase = i % kNumPhases;
    const uint32_t seed = first_seed + i;
    prctl(PR_SET_NAME, StrCat("seed ", seed).c_str());  // for SIGALRM's report of a hang
    alarm(3 * kDeadlineMs / 1'000);
    FaultRun run(seed, kFaults.at(row), static_cast<Phase>(phase));
    std::string log;
    {
      const CapturedStderr captured;  // engines log every queue pair that fails
      struck.at(row).at(phase) += run.Execute() ? 1 : 0;
      log = captured.Text();
    }
    if (run.problems().empty()) continue;
    ADD_FAILURE() << "seed " << seed << ", " << run.ToString() << ": " << run.problems() << "\n"
                  << log;
  }
  alarm(0);
  EXPECT_EQ(Softverbs().num_objects(), objects);
  if (kNumRuns < 1'000) return;  // chance may have left a cell empty
  for (size_t row = 0; row < kFaults.size(); ++row) {
    for (size_t phase = 0; phase < kNumPhases; ++phase) {
      EXPECT_GT(struck.at(row).at(phase), 0)
          << kFaults.at(row).name << " never struck in phase " << kPhaseNames.at(phase);
    }
  }
}

}  // namespace
}  // namespace jaxhet::testing
