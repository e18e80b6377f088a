#include <algorithm>

#include "xla_plugin/engine/host/open_exchanges.h"

// The checks of open exchanges, and the facts of their errors; texts are in messages.cc.
namespace jaxhet {

using std::chrono::milliseconds;

namespace {

constexpr std::string_view kUnsound =
    ". No sound process sends this: its messages are changed on their way, or this is an error in "
    "jaxhet; please report it";

}  // namespace

// Throws for a field that no sound peer sends; the caller adds the sender's name.
void OpenExchanges::CheckStart(const StartInfo& info, int sender) const {
  const Plan* const plan = peers_.PlansOf(sender).Find(info.plan);
  if (plan == nullptr) {
    Throw(ErrorCode::kTransport, "it started an exchange of a plan that it never sent");
  }
  if (info.run <= 0 || info.sequence < 0 || info.index < 0 || info.index >= plan->num_exchanges) {
    Throw(ErrorCode::kTransport, "it started exchange ", info.index, " in run ", info.run,
          " with the sequence ", info.sequence, kUnsound);
  }
  if (peers_.roster().num_ranks() > 0) CheckRanks(info, sender);
}

void OpenExchanges::CheckRanks(const StartInfo& info, int sender) const {
  const Roster& roster = peers_.roster();
  if (!roster.IsRankOf(info.source, sender)) {
    Throw(ErrorCode::kTransport, "it speaks for rank ", info.source, ", which is not its own",
          kUnsound);
  }
  if (!roster.IsRankOf(info.destination, roster.process())) {
    Throw(ErrorCode::kTransport, "it started an exchange with rank ", info.destination,
          ", which is not of this process", kUnsound);
  }
}

void OpenExchanges::CheckRanksOfStarts() const {
  for (const auto& [own, state] : communicators_) {
    for (const auto& [key, arrival] : state.arrived) {
      AttributeTo(
          arrival.process, [&] { return ContextOf(arrival.process); },
          [&] { CheckRanks(arrival.info, arrival.process); });
    }
  }
}

void OpenExchanges::CheckLeft(const Peer& peer) const {
  for (const auto& [ticket, transfer] : transfers_) {
    if (transfer->met || peers_.OfRank(transfer->peer_rank).process != peer.process) continue;
    throw LeftError(Where(*transfer->exchange), peers_.roster().ProcessName(peer.process),
                    peer.process);
  }
}

void OpenExchanges::CheckDeadlines() {
  for (const auto& [id, exchange] : exchanges_) {
    for (const PeerTransfer& transfer : exchange.transfers) {
      const Time deadline = DeadlineOf(transfer);
      if (agenda_.now >= deadline) ThrowLate(exchange);
      agenda_.next_timer = std::min(agenda_.next_timer, deadline);
    }
  }
}

Time OpenExchanges::DeadlineOf(const PeerTransfer& transfer) const {
  if (transfer.met && transfer.IsDone()) return Time::max();
  const Exchange& exchange = *transfer.exchange;
  const ExchangeRequest& request = exchange.request;
  const milliseconds wait_budget(request.deadline_ms > 0 ? request.deadline_ms
                                                         : options_.deadline_ms);
  const CommunicatorState& state = communicators_.at({request.rank, exchange.communicator});
  const auto announced = state.announced.find({transfer.peer_rank, request.plan});
  if (announced != state.announced.end()) {
    return std::max(exchange.started, announced->second) + wait_budget;
  }
  return exchange.started + std::max(wait_budget, milliseconds(options_.first_deadline_ms));
}

std::string OpenExchanges::Where(const Exchange& exchange) const {
  return WhereText(OwnFacts(exchange.request));
}

std::string OpenExchanges::ContextOf(int process) const {
  const PeerTransfer* const transfer = With(process);
  if (transfer == nullptr) return peers_.Where(process);
  return StrCat(Where(*transfer->exchange), peers_.roster().RankAndProcess(transfer->peer_rank),
                ": ");
}

const PeerTransfer* OpenExchanges::With(int process) const {
  for (const auto& [id, exchange] : exchanges_) {
    for (const PeerTransfer& transfer : exchange.transfers) {
      const bool is_open = !transfer.met || !transfer.IsDone();
      if (is_open && peers_.roster().ProcessOf(transfer.peer_rank) == process) return &transfer;
    }
  }
  return nullptr;
}

LatePeer OpenExchanges::LateFacts(const PeerTransfer& transfer) const {
  const auto since = [&](Time time) {
    return std::chrono::duration_cast<std::chrono::milliseconds>(agenda_.now - time);
  };
  const int process = peers_.roster().ProcessOf(transfer.peer_rank);
  LatePeer late{.name = peers_.roster().RankAndProcess(transfer.peer_rank),
                .waited = since(transfer.exchange->started),
                .has_started = transfer.met,
                .last_exchange = {},
                .last_ago = {}};
  if (transfer.met) return late;
  const auto& starts = peers_.all().at(process).last_starts;
  const auto last = starts.find(transfer.peer_rank);
  if (last == starts.end()) return late;
  late.last_exchange =
      peers_.PlansOf(process).Describe(last->second.info.plan, last->second.info.index);
  late.last_ago = since(last->second.time);
  return late;
}

void OpenExchanges::ThrowLate(const Exchange& exchange) const {
  std::vector<LatePeer> peers;
  int failed_process = -1;
  for (const PeerTransfer& transfer : exchange.transfers) {
    if (agenda_.now < DeadlineOf(transfer)) continue;
    failed_process = peers_.roster().ProcessOf(transfer.peer_rank);
    peers.push_back(LateFacts(transfer));
  }
  throw LateError(OwnFacts(exchange.request), peers, failed_process);
}

void OpenExchanges::CheckSameRun(const CommunicatorState& state, const StartInfo& info) const {
  if (info.run > state.run()) return;  // it is ahead of us
  const auto own = [&] { return peers_.FactsOf(info.destination, state.plan(), info.index); };
  const auto peer = [&] { return peers_.FactsOf(info.source, info.plan, info.index); };
  if (info.plan != state.plan()) throw ProgramMismatchError(own(), peer());
  if (info.run != state.run()) throw PassedExchangeError(own(), peer());
}

// `theirs` has come, and our rank has not started it. If that rank is in another program, which
// also waits for theirs, the two have come to their programs in different order, or the programs
// differ in their groups: neither would ever go on.
void OpenExchanges::CheckOrder(const StartInfo& theirs) const {
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
      if (!waits(other, state.run_id())) continue;
      throw ProgramMismatchError(peers_.FactsOf(theirs.destination, state.plan(), theirs.index),
                                 peers_.FactsOf(theirs.source, theirs.plan, theirs.index));
    }
  }
}

// `exchange` starts, and its rank has exchanges of another execution open.
void OpenExchanges::ThrowOverlap(const Exchange& exchange) const {
  const ExchangeRequest& started = exchange.request;
  const auto is_of_other = [&](const auto& entry) {
    const ExchangeRequest& open = entry.second.request;
    return open.rank == started.rank && !open.is_detached &&
           (open.run_id != started.run_id || open.plan != started.plan);
  };
  const ExchangeRequest& open = std::ranges::find_if(exchanges_, is_of_other)->second.request;
  throw OverlapError(peers_.plans().DescribeWithProgram(started.plan, started.index),
                     peers_.plans().DescribeWithProgram(open.plan, open.index));
}

void OpenExchanges::CheckSameExchange(const PeerTransfer& transfer, const StartInfo& info) const {
  const ExchangeRequest& request = transfer.exchange->request;
  const auto peer = [&] { return peers_.FactsOf(info.source, info.plan, info.index); };
  if (info.plan != request.plan) throw ProgramMismatchError(OwnFacts(request), peer());
  const bool is_same = info.kind == static_cast<int64_t>(request.kind) &&
                       info.send_bytes == transfer.receive.num_bytes() &&
                       info.receive_bytes == transfer.send.num_bytes();
  if (is_same) return;
  throw ExchangeMismatchError(OwnFacts(request), peer(), transfer.receive.num_bytes(),
                              info.send_bytes);
}

}  // namespace jaxhet
