#include "xla_plugin/engine/control/message_checks.h"

#include <algorithm>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/engine/common/exchange.h"

namespace jaxhet {
namespace {

constexpr std::string_view kWhatNow =
    ". No sound process sends this: its messages are changed on their way, or this is an error in "
    "jaxhet; please report it";

bool IsRankOf(int rank, int process, const Roster& roster) {
  return rank >= 0 && rank < roster.num_ranks() && roster.ProcessOf(rank) == process;
}

}  // namespace

void CheckStart(const StartInfo& info, const Plan* plan) {
  if (plan == nullptr) {
    Throw(ErrorCode::kTransport, "it started an exchange of a plan that it never sent");
  }
  const auto check = [](bool is_sound, std::string_view field, auto value) {
    if (is_sound) return;
    Throw(ErrorCode::kTransport, "it started an exchange with the ", field, " ", value, kWhatNow);
  };
  check(info.run > 0, "run", info.run);
  check(info.index >= 0 && info.index < plan->num_exchanges, "index", info.index);
  check(info.sequence >= 0, "sequence", info.sequence);
  const bool is_kind = std::ranges::any_of(kExchangeKinds, [&](const auto& entry) {
    return static_cast<int64_t>(entry.second) == info.kind;
  });
  check(is_kind, "kind", info.kind);
  check(info.ticket > 0, "ticket", info.ticket);
  check(info.eager <= 1, "eager flag", info.eager);
}

void CheckRanks(const StartInfo& info, int sender, const Roster& roster) {
  if (!IsRankOf(info.source, sender, roster)) {
    Throw(ErrorCode::kTransport, "it speaks for rank ", info.source, ", which is not its own",
          kWhatNow);
  }
  if (!IsRankOf(info.destination, roster.process(), roster)) {
    Throw(ErrorCode::kTransport, "it started an exchange with rank ", info.destination,
          ", which is not of this process", kWhatNow);
  }
}

void CheckFailedProcess(const Error& error, const Roster& roster) {
  if (error.failed_process() >= 0 && error.failed_process() < roster.num_processes()) return;
  Throw(ErrorCode::kTransport, "it reports a failure of process ", error.failed_process(),
        ", which does not exist: ", error.text());
}

void CheckEmpty(std::string_view body) {
  if (body.empty()) return;
  Throw(ErrorCode::kTransport, "a message is ", body.size(), " bytes too long", kWhatNow);
}

}  // namespace jaxhet
