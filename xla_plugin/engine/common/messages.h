#ifndef XLA_PLUGIN_ENGINE_COMMON_MESSAGES_H_
#define XLA_PLUGIN_ENGINE_COMMON_MESSAGES_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "xla_plugin/base/error.h"
#include "xla_plugin/engine/common/plans.h"

// The texts of failures: who, which exchange, with whom, the cause, what to do. Pure functions of
// facts, which exchanges between hosts and between devices fill in.
namespace jaxhet {

// Advice for two executions that overlap.
inline constexpr std::string_view kLaunchInOrder =
    "Launch programs that exchange over islands from one thread, one after the other, and leave "
    "jax_cpu_enable_async_dispatch off.";

// A rank and one of its exchanges, by the names that people know.
struct RankFacts {
  int process;
  std::string rank;                  // "rank 0/2 cuda0"
  std::string rank_and_process;      // "rank 0 of process 0 (host 0), cuda0"
  std::string exchange;              // "exchange 3 (...)", as the plan of its process says
  std::shared_ptr<const Plan> plan;  // null if its process has not sent it
};

// "[rank 0/2 cuda0] exchange 3 (...): ".
std::string WhereText(const RankFacts& own);

// Calls `function`. If it throws an Error that names no process, throws one that names `process`.
// `context()` returns what to put before the text.
template <typename Context, typename Function>
void AttributeTo(int process, Context context, Function function) {
  try {
    function();
  } catch (const Error& error) {
    if (error.failed_process() >= 0) throw;
    throw Error(error.code(), StrCat(context(), error.text()), process);
  }
}

// A peer that an exchange waits for.
struct LatePeer {
  std::string name;  // rank and process
  std::chrono::milliseconds waited;
  bool has_started = false;  // this exchange
  // The latest exchange of the peer, if it has not started this one.
  std::optional<std::string> last_exchange;
  std::optional<std::chrono::milliseconds> last_ago;  // not known between devices
};
// `process` is that of the last peer.
Error LateError(const RankFacts& own, std::span<const LatePeer> peers, int process);

// The ranks started exchanges of different plans, which both are known.
Error ProgramMismatchError(const RankFacts& own, const RankFacts& peer);
// The peer's plan is not known.
Error UnknownProgramError(const RankFacts& own, const RankFacts& peer);
// The peer started another exchange of the same plan, or with other bytes.
Error ExchangeMismatchError(const RankFacts& own, const RankFacts& peer, uint64_t own_bytes,
                            uint64_t peer_bytes);
// The peer started an exchange that this rank has passed.
Error PassedExchangeError(const RankFacts& own, const RankFacts& peer);

// Two executions overlap on a rank; both exchanges with their programs.
Error OverlapError(std::string_view started, std::string_view open);

// `where` ends with ": ". The process has left the job, or can't be reached any more.
Error LeftError(std::string_view where, std::string_view process_name, int process);
Error LostError(std::string_view where, std::string_view why, int process);
// This process leaves the job.
Error UnderWayError(std::string_view where);
Error DevicesUnderWayError();

}  // namespace jaxhet

#endif  // XLA_PLUGIN_ENGINE_COMMON_MESSAGES_H_
