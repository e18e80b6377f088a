#include <algorithm>

#include "xla_plugin/engine/control/message_checks.h"
#include "xla_plugin/engine/host/open_exchanges.h"

// The checks of open exchanges, and the facts of their errors; texts are in messages.cc.
namespace jaxhet {

using std::chrono::milliseconds;

namespace {

MovedBytes Moved(const PeerTransfer& transfer) {
  return {.received = transfer.received,
          .to_receive = transfer.receive.num_bytes(),
          .sent = transfer.sent,
          .to_send = transfer.send.num_bytes()};
}

}  // namespace

void OpenExchanges::CheckRanksOfStarts() const {
  for (const auto& [own, state] : communicators_) {
    for (const auto& [key, arrival] : state.arrived) {
      AttributeTo(
          arrival.process, [&] { return ContextOf(arrival.process); },
          [&] { CheckRanks(arrival.info, arrival.process, peers_.roster()); });
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

ErrorContext OpenExchanges::ContextOf(int process) const {
  const PeerTransfer* const transfer = With(process);
  if (transfer == nullptr) return {.before = peers_.Where(process), .after = {}};
  return {.before = StrCat(Where(*transfer->exchange),
                           peers_.roster().RankAndProcess(transfer->peer_rank), ": "),
          .after = MovedText(Moved(*transfer))};
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
                .moved = {},
                .last_exchange = {},
                .last_ago = {}};
  if (transfer.met) {
    late.moved = Moved(transfer);
    return late;
  }
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
  const TransferSizes ours{.send = transfer.send.num_bytes(),
                           .receive = transfer.receive.num_bytes(),
                           .kind = static_cast<int64_t>(request.kind)};
  const TransferSizes theirs{
      .send = info.send_bytes, .receive = info.receive_bytes, .kind = info.kind};
  if (theirs.kind == ours.kind && theirs.send == ours.receive && theirs.receive == ours.send)
    return;
  throw SizeMismatchError(OwnFacts(request), peer(), ours, theirs);
}

}  // namespace jaxhet
