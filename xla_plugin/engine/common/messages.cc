#include "xla_plugin/engine/common/messages.h"

#include "xla_plugin/base/strings.h"

namespace jaxhet {
namespace {

constexpr std::string_view kEqualBranches =
    "Make the program's branches depend on values that are equal on all ranks.";
constexpr std::string_view kWaitForResults = "Wait for the results before jaxhet.shutdown().";

std::string LateText(const LatePeer& peer) {
  if (peer.has_started) {
    return StrCat(peer.name,
                  " is too slow: it has started it, but its data has not arrived within ",
                  peer.waited.count(), " ms. ");
  }
  const std::string text =
      StrCat(peer.name, " has not started it within ", peer.waited.count(), " ms; ");
  if (!peer.last_exchange) return StrCat(text, "it has started none so far. ");
  const std::string ago = peer.last_ago ? StrCat(", ", peer.last_ago->count(), " ms ago") : "";
  return StrCat(text, "it last started ", *peer.last_exchange, ago, ". ");
}

}  // namespace

std::string WhereText(const RankFacts& own) {
  return StrCat("[", own.rank, "] ", own.exchange, ": ");
}

Error LateError(const RankFacts& own, std::span<const LatePeer> peers, int process) {
  std::string text = WhereText(own);
  for (const LatePeer& peer : peers) text += LateText(peer);
  text +=
      "The process went another way in its program, is stopped, or is slower than the deadline; "
      "if it is slower, raise the deadline.";
  return {ErrorCode::kDeadline, text, process};
}

Error ProgramMismatchError(const RankFacts& own, const RankFacts& peer) {
  const PlanSide ours{.rank = own.rank, .plan = *own.plan};
  const PlanSide theirs{.rank = peer.rank, .plan = *peer.plan};
  return {ErrorCode::kPlanMismatch,
          StrCat("[", own.rank, "] ", peer.rank_and_process, DescribeMismatch(ours, theirs)),
          peer.process};
}

Error UnknownProgramError(const RankFacts& own, const RankFacts& peer) {
  return {ErrorCode::kPlanMismatch,
          StrCat(WhereText(own), peer.rank_and_process,
                 " runs another program, whose plan it has not sent. Run the same program on all "
                 "ranks in the same order."),
          peer.process};
}

Error ExchangeMismatchError(const RankFacts& own, const RankFacts& peer, uint64_t own_bytes,
                            uint64_t peer_bytes) {
  return {ErrorCode::kPlanMismatch,
          StrCat(WhereText(own), peer.rank_and_process, " is at ", peer.exchange, " (", peer_bytes,
                 " bytes, here ", own_bytes, "). ", kEqualBranches),
          peer.process};
}

Error PassedExchangeError(const RankFacts& own, const RankFacts& peer) {
  return {ErrorCode::kPlanMismatch,
          StrCat("[", own.rank, "] ", peer.rank_and_process, " started ", peer.exchange,
                 ", which this rank's program has passed without starting it. ", kEqualBranches),
          peer.process};
}

Error OverlapError(std::string_view started, std::string_view open) {
  return {ErrorCode::kUsage,
          StrCat("two executions of programs overlap on this rank: one starts ", started,
                 ", and another still has ", open, " open. ", kLaunchInOrder)};
}

Error LeftError(std::string_view where, std::string_view process_name, int process) {
  return {
      ErrorCode::kPeer,
      StrCat(where, process_name,
             " has left the job: its program ended or called jaxhet.shutdown. All processes must "
             "run the same programs."),
      process};
}

Error LostError(std::string_view where, std::string_view why, int process) {
  return {ErrorCode::kPeer,
          StrCat(where, "the process has died or can't be reached: ", why,
                 ". Look at what that process printed last, then run the job again from its last "
                 "checkpoint."),
          process};
}

Error UnderWayError(std::string_view where) {
  return {
      ErrorCode::kUsage,
      StrCat(where, "it was still under way when this process left the job. ", kWaitForResults)};
}

Error DevicesUnderWayError() {
  return {ErrorCode::kUsage,
          StrCat("exchanges between devices were still under way when this process left the job. ",
                 kWaitForResults)};
}

}  // namespace jaxhet
