#include <algorithm>

#include "xla_plugin/engine/progress_engine.h"

// The checks of the engine, and the facts of its errors; their texts are in messages.cc.
namespace jaxhet {
namespace {

constexpr std::chrono::seconds kArrivalTime{1};  // from slots or sockets into a result

}  // namespace

RankFacts ProgressEngine::FactsOf(int rank, int64_t plan, int64_t index) const {
  const int process = roster_.ProcessOf(rank);
  const Plans unknown;  // stands for a process without connection
  const bool is_known = process == roster_.process() || peers_.contains(process);
  const Plans& plans = is_known ? PlansOf(process) : unknown;
  return {.process = process,
          .rank = roster_.RankName(rank),
          .rank_and_process = roster_.RankAndProcess(rank),
          .exchange = plans.Describe(plan, index),
          .plan = plans.Share(plan)};
}

// The rank may not exist.
RankFacts ProgressEngine::OwnFacts(const ExchangeRequest& request) const {
  return {.process = roster_.process(),
          .rank = roster_.RankName(request.rank),
          .rank_and_process = roster_.RankAndProcess(request.rank),
          .exchange = plans_.Describe(request.plan, request.index),
          .plan = plans_.Share(request.plan)};
}

std::string ProgressEngine::Where(const Exchange& exchange) const {
  return WhereText(OwnFacts(exchange.request));
}

std::string ProgressEngine::Where(int process) const {
  if (const PeerTransfer* const transfer = OpenTransferWith(process)) {
    return StrCat(Where(*transfer->exchange), roster_.RankAndProcess(transfer->peer_rank), ": ");
  }
  if (const auto wait = DeviceWaitFor(process)) {
    return StrCat(WhereText(FactsOf(wait->rank, wait->plan, wait->index)),
                  roster_.RankAndProcess(wait->peer_rank), ": ");
  }
  return StrCat("[", roster_.OwnName(), "] ", roster_.ProcessName(process), ": ");
}

std::optional<MovedBytes> ProgressEngine::Moved(int process) const {
  const PeerTransfer* const transfer = OpenTransferWith(process);
  if (transfer == nullptr) return std::nullopt;
  return MovedBytes{.received = transfer->received,
                    .to_receive = transfer->receive.num_bytes(),
                    .sent = transfer->sent,
                    .to_send = transfer->send.num_bytes()};
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
    throw LeftError(Where(peer.process), roster_.ProcessName(peer.process), peer.process);
  }
  if (peer.lost.empty()) return;
  throw LostError(Where(peer.process), peer.lost, MovedText(Moved(peer.process)), peer.process);
}

LatePeer ProgressEngine::LateFacts(const PeerTransfer& transfer) const {
  const auto since = [&](Time time) {
    return std::chrono::duration_cast<std::chrono::milliseconds>(now_ - time);
  };
  const int process = roster_.ProcessOf(transfer.peer_rank);
  LatePeer late{.name = roster_.RankAndProcess(transfer.peer_rank),
                .waited = since(transfer.exchange->started),
                .has_started = transfer.met,
                .moved = {},
                .last_exchange = {},
                .last_ago = {}};
  if (transfer.met) {
    late.moved = Moved(process);
    return late;
  }
  const auto& starts = peers_.at(process).last_starts;
  const auto last = starts.find(transfer.peer_rank);
  if (last == starts.end()) return late;
  late.last_exchange = PlansOf(process).Describe(last->second.info.plan, last->second.info.index);
  late.last_ago = since(last->second.time);
  return late;
}

void ProgressEngine::ThrowLate(const Exchange& exchange) const {
  std::vector<LatePeer> peers;
  int failed_process = -1;
  for (const PeerTransfer& transfer : exchange.transfers) {
    if (now_ < DeadlineOf(transfer)) continue;
    failed_process = roster_.ProcessOf(transfer.peer_rank);
    peers.push_back(LateFacts(transfer));
  }
  throw LateError(OwnFacts(exchange.request), peers, failed_process);
}

void ProgressEngine::CheckSameRun(const CommunicatorState& state, const StartInfo& info) const {
  if (info.run > state.run()) return;  // it is ahead of us
  const auto own = [&] { return FactsOf(info.destination, state.plan(), info.index); };
  const auto peer = [&] { return FactsOf(info.source, info.plan, info.index); };
  if (info.plan != state.plan()) throw ProgramMismatchError(own(), peer());
  if (info.run != state.run()) throw PassedExchangeError(own(), peer());
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
      if (!waits(other, state.run_id())) continue;
      throw ProgramMismatchError(FactsOf(theirs.destination, state.plan(), theirs.index),
                                 FactsOf(theirs.source, theirs.plan, theirs.index));
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
  throw OverlapError(plans_.DescribeWithProgram(started.plan, started.index),
                     plans_.DescribeWithProgram(open.plan, open.index));
}

void ProgressEngine::CheckSameExchange(const PeerTransfer& transfer, const StartInfo& info) const {
  const ExchangeRequest& request = transfer.exchange->request;
  const auto peer = [&] { return FactsOf(info.source, info.plan, info.index); };
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
