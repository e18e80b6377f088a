#include <algorithm>

#include "xla_plugin/engine/progress_engine.h"

// The words of the engine's errors: who, which exchange, with whom, the cause, what next.
namespace jaxhet {
namespace {

constexpr std::string_view kAfterDeath =
    " Look at what that process printed last, then run the job again from its last checkpoint.";
constexpr std::chrono::seconds kArrivalTime{1};  // from slots or sockets into a result

}  // namespace

std::string ProgressEngine::Where(int rank, int64_t plan, int64_t index) const {
  return StrCat("[", roster_.RankName(rank), "] ", plans_.Describe(plan, index), ": ");
}

std::string ProgressEngine::Where(const Exchange& exchange) const {
  const ExchangeRequest& request = exchange.request;
  return Where(request.rank, request.plan, request.index);
}

std::string ProgressEngine::Where(int process) const {
  if (const PeerTransfer* const transfer = OpenTransferWith(process)) {
    return StrCat(Where(*transfer->exchange), roster_.RankAndProcess(transfer->peer_rank), ": ");
  }
  if (const auto wait = DeviceWaitFor(process)) {
    return StrCat(Where(wait->rank, wait->plan, wait->index),
                  roster_.RankAndProcess(wait->peer_rank), ": ");
  }
  return StrCat("[", roster_.OwnName(), "] ", roster_.ProcessName(process), ": ");
}

std::string ProgressEngine::Moved(int process) const {
  const PeerTransfer* const transfer = OpenTransferWith(process);
  if (transfer == nullptr) return {};
  return StrCat(" (", transfer->received, " of ", transfer->receive.num_bytes(),
                " bytes received, ", transfer->sent, " of ", transfer->send.num_bytes(), " sent)");
}

const PeerTransfer* ProgressEngine::OpenTransferWith(int process) const {
  for (const auto& [id, exchange] : exchanges_) {
    for (const PeerTransfer& transfer : exchange.transfers) {
      const bool is_open = !transfer.met || !transfer.IsDone();
      if (is_open && roster_.ProcessOf(transfer.peer_rank) == process) return &transfer;
    }
  }
  return nullptr;
}

std::optional<DeviceWait> ProgressEngine::DeviceWaitFor(int process) const {
  if (devices_ == nullptr) return std::nullopt;
  return devices_->OldestWait(roster_.RanksOf(process));
}

std::string ProgressEngine::Left(const Peer& peer) const {
  return StrCat(roster_.ProcessName(peer.process),
                " has left the job (jaxhet.shutdown). All processes must run the same programs.");
}

// For a peer that has left. What devices wait for may have come as far as a channel's slots, or its
// sockets.
bool ProgressEngine::WaitsInVain(const Peer& peer) {
  if (!peer.lost.empty() && OpenTransferWith(peer.process) != nullptr) return true;
  if (!peer.channel.closed()) return false;
  const auto wait = DeviceWaitFor(peer.process);
  if (!wait) return false;
  next_timer_ = std::min(next_timer_, now_ + kBusyPeriod);
  return wait->since < now_ - kArrivalTime;
}

// Whatever `peer` had to say has been read.
void ProgressEngine::CheckPeer(Peer& peer) {
  if (peer.left) {
    if (!WaitsInVain(peer)) return;
    throw Error(ErrorCode::kPeer, Where(peer.process) + Left(peer), peer.process);
  }
  if (peer.lost.empty()) return;
  throw Error(ErrorCode::kPeer,
              StrCat(Where(peer.process), "the process has died or can't be reached: ", peer.lost,
                     Moved(peer.process), ".", kAfterDeath),
              peer.process);
}

void ProgressEngine::ThrowLate(const Exchange& exchange) const {
  std::string text = Where(exchange);
  int failed_process = -1;
  for (const PeerTransfer& transfer : exchange.transfers) {
    if (now_ < DeadlineOf(transfer)) continue;
    failed_process = roster_.ProcessOf(transfer.peer_rank);
    text += roster_.RankAndProcess(transfer.peer_rank);
    if (transfer.met) {
      text += StrCat(" is too slow", Moved(failed_process), "; ");
      continue;
    }
    const auto waited =
        std::chrono::duration_cast<std::chrono::milliseconds>(now_ - exchange.started);
    text += StrCat(" has not started it within ", waited.count(), " ms; ");
    text += LastStartOf(transfer.peer_rank);
  }
  text +=
      "The process answers, so its program went another way or is slower than the deadline; "
      "if the latter, raise the deadline.";
  throw Error(ErrorCode::kDeadline, text, failed_process);
}

std::string ProgressEngine::LastStartOf(int rank) const {
  const int process = roster_.ProcessOf(rank);
  const auto& starts = peers_.at(process).last_starts;
  const auto last = starts.find(rank);
  if (last == starts.end()) return "it has started none so far. ";
  const StartInfo& info = last->second.info;
  const auto ago =
      std::chrono::duration_cast<std::chrono::milliseconds>(now_ - last->second.time).count();
  return StrCat("it last started ", PlansOf(process).Describe(info.plan, info.index), ", ", ago,
                " ms ago. ");
}

void ProgressEngine::CheckSameRun(const CommunicatorState& state, const StartInfo& info) const {
  if (info.run > state.run()) return;  // it is ahead of us
  if (info.plan != state.plan()) ThrowPlanMismatch(state.plan(), info);
  if (info.run == state.run()) return;
  const int process = roster_.ProcessOf(info.source);
  throw Error(
      ErrorCode::kPlanMismatch,
      StrCat("[", roster_.RankName(info.destination), "] ", roster_.RankAndProcess(info.source),
             " started ", PlansOf(process).Describe(info.plan, info.index),
             ", which this rank's program has passed without starting it. Make the "
             "program's branches depend on values that are equal on all ranks."),
      process);
}

// `theirs` has come, and our rank has not started it. If that rank is in another program, which
// also waits for theirs, the two have come to their programs in different order, or the programs
// differ in their groups: neither would ever go on.
void ProgressEngine::CheckOrder(const StartInfo& theirs) const {
  const auto waits = [&](const CommunicatorState& state, int64_t run_id) {
    if (state.waiting.empty() || state.run_id() != run_id) return false;
    return std::ranges::any_of(
        state.waiting, [&](const auto& entry) { return entry.first.peer_rank == theirs.source; });
  };
  for (const auto& [own, state] : communicators_) {
    const bool is_elsewhere =
        own.first == theirs.destination && !state.waiting.empty() && state.plan() != theirs.plan;
    if (!is_elsewhere) continue;
    for (const auto& [key, other] : communicators_) {
      if (waits(other, state.run_id())) ThrowPlanMismatch(state.plan(), theirs);
    }
  }
}

// `exchange` starts, and its rank has exchanges of another execution open.
void ProgressEngine::ThrowOverlap(const Exchange& exchange) const {
  const ExchangeRequest& started = exchange.request;
  const auto is_of_other = [&](const auto& entry) {
    const ExchangeRequest& open = entry.second.request;
    return open.rank == started.rank &&
           (open.run_id != started.run_id || open.plan != started.plan);
  };
  const ExchangeRequest& open = std::ranges::find_if(exchanges_, is_of_other)->second.request;
  Throw(ErrorCode::kUsage, "two executions of programs overlap on this rank: one starts ",
        plans_.DescribeWithProgram(started.plan, started.index), ", and another still has ",
        plans_.DescribeWithProgram(open.plan, open.index), " open. ", kLaunchInOrder);
}

Error ProgressEngine::PlanMismatch(int rank, int64_t plan, int peer_rank, int64_t peer_plan) const {
  const int process = roster_.ProcessOf(peer_rank);
  const PlanSide ours{.rank = roster_.RankName(rank), .plan = *plans_.Find(plan)};
  const PlanSide theirs{.rank = roster_.RankName(peer_rank),
                        .plan = *PlansOf(process).Find(peer_plan)};
  return {ErrorCode::kPlanMismatch,
          StrCat("[", ours.rank, "] ", roster_.RankAndProcess(peer_rank),
                 DescribeMismatch(ours, theirs)),
          process};
}

void ProgressEngine::CheckSameExchange(const PeerTransfer& transfer, const StartInfo& info) const {
  const Exchange& exchange = *transfer.exchange;
  const ExchangeRequest& request = exchange.request;
  if (info.plan != request.plan) ThrowPlanMismatch(request.plan, info);
  if (info.kind == static_cast<int64_t>(request.kind) &&
      info.send_bytes == transfer.receive.num_bytes() &&
      info.receive_bytes == transfer.send.num_bytes()) {
    return;
  }
  throw Error(ErrorCode::kPlanMismatch,
              StrCat(Where(exchange), roster_.RankAndProcess(transfer.peer_rank),
                     " starts it with other sizes or another kind: it sends ", info.send_bytes,
                     " bytes and expects ", info.receive_bytes, " (kind ", info.kind, "), here ",
                     transfer.receive.num_bytes(), " are expected and ", transfer.send.num_bytes(),
                     " sent (kind ", static_cast<int64_t>(request.kind),
                     "). The plans agree, so this is an error in jaxhet: please report it."),
              roster_.ProcessOf(transfer.peer_rank));
}

}  // namespace jaxhet
