#include "xla_plugin/engine/host/open_exchanges.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <ranges>
#include <set>
#include <utility>

#include "xla_plugin/base/huge_pages.h"
#include "xla_plugin/engine/common/messages.h"
#include "xla_plugin/engine/host/partition.h"

namespace jaxhet {
namespace {

// Record of an exchange that starts.
FlightRecord RecordOf(const Exchange& exchange) {
  const ExchangeRequest& request = exchange.request;
  size_t operand_bytes = 0;
  for (const auto operand : request.operands) operand_bytes += operand.size();
  return {.id = exchange.id,
          .rank = request.rank,
          .kind = request.kind,
          .plan = request.plan,
          .index = request.index,
          .run = exchange.run,
          .sequence = exchange.sequence,
          .operand_bytes = operand_bytes,
          .group = {request.group.begin(), request.group.end()},
          .state = FlightState::kStarted,
          .started = exchange.started,
          .ended = {}};
}

constexpr std::string_view kUnsound =
    ". No sound process sends this: its messages are changed on their way, or this is an error in "
    "jaxhet; please report it";

constexpr size_t kMostExecutions = 64;  // XLA's CPU client accepts 32 for each device

}  // namespace

using std::chrono::milliseconds;

OpenExchanges::OpenExchanges(PeerTable& peers, Agenda& agenda, const Options& options)
    : peers_(peers), agenda_(agenda), options_(options) {}

void OpenExchanges::Start(ExchangeRequest request, int64_t id) {
  Exchange& exchange = exchanges_[id];
  exchange.request = std::move(request);
  exchange.id = id;
  exchange.started = agenda_.now;
  ++started_;
  AttributeTo(
      peers_.roster().process(), [&] { return Where(exchange); }, [&] { StartOrThrow(exchange); });
}

void OpenExchanges::Refuse(ExchangeRequest request, int64_t id, std::shared_ptr<const Error> why) {
  completions_.push_back({id, std::move(request.done), std::move(why)});
}

void OpenExchanges::Drop(const std::shared_ptr<const Error>& why) {
  for (auto& [id, exchange] : exchanges_) {
    recorder_.Ended(id, FlightState::kFailed, Clock::now());
    completions_.push_back({id, std::move(exchange.request.done), why});
  }
  exchanges_.clear();
  transfers_.clear();
  communicators_.clear();
  siblings_.Clear();
}

void OpenExchanges::StartOrThrow(Exchange& exchange) {
  const ExchangeRequest& request = exchange.request;
  exchange.communicator = CommunicatorId(request.group);
  if (peers_.plans().Find(request.plan) == nullptr) {
    Throw(ErrorCode::kUsage, "its plan ", request.plan, " was never registered");
  }
  Partition partition = PartitionBuffers(request);
  CheckOverlap(request);
  siblings_.Add(request);
  CommunicatorState& state = communicators_[{request.rank, exchange.communicator}];
  const auto position = state.Enter(request.run_id, request.plan, request.index);
  exchange.run = position.run;
  exchange.sequence = position.sequence;
  recorder_.Started(RecordOf(exchange));
  for (const auto& [key, arrival] : state.arrived) CheckSameRun(state, arrival.info);

  for (const auto result : request.results) AdviseHugePages(result);
  for (const iovec& entry : partition.padding.entries()) {
    std::memset(entry.iov_base, 0, entry.iov_len);
  }
  exchange.open_transfers = partition.members.size() + 1;  // one more for this function
  for (MemberParts& member : partition.members) {
    PeerTransfer& transfer = exchange.transfers.emplace_back();
    transfer.send = std::move(member.send);
    transfer.receive = std::move(member.receive);
    transfer.exchange = &exchange;
    transfer.peer_rank = member.rank;
    Announce(transfer);
    agenda_.next_timer = std::min(agenda_.next_timer, DeadlineOf(transfer));
    const MeetingKey key{exchange.run, request.index, exchange.sequence, transfer.peer_rank};
    if (const auto node = state.arrived.extract(key)) {
      const Arrival& arrival = node.mapped();
      Peer& peer = peers_.all().at(arrival.process);
      AttributeTo(
          peer.process, [&] { return ContextOf(peer.process); },
          [&] { Meet(transfer, peer, arrival.info, arrival.tail); });
    } else {
      state.waiting[key] = &transfer;
    }
  }
  for (const auto& [key, other] : communicators_) {
    for (const auto& [meeting, arrival] : other.arrived) CheckOrder(arrival.info);
  }
  Release(exchange);
}

void OpenExchanges::Announce(PeerTransfer& transfer) {
  const Exchange& exchange = *transfer.exchange;
  const ExchangeRequest& request = exchange.request;
  Peer& peer = peers_.OfRank(transfer.peer_rank);
  if (peer.left) {
    throw LeftError(Where(exchange), peers_.roster().ProcessName(peer.process), peer.process);
  }
  if (!peer.connection) {
    Throw(ErrorCode::kUsage, "data moves between devices, and this is an exchange of host memory");
  }
  peers_.SendPlan(peer, request.plan);
  transfer.ticket = ++last_ticket_;
  transfers_[transfer.ticket] = &transfer;

  const bool eager = transfer.send.num_bytes() <= static_cast<size_t>(options_.eager_bytes);
  const StartInfo info{.communicator = exchange.communicator,
                       .run = exchange.run,
                       .plan = request.plan,
                       .index = request.index,
                       .sequence = exchange.sequence,
                       .kind = static_cast<int64_t>(request.kind),
                       .source = request.rank,
                       .destination = transfer.peer_rank,
                       .send_bytes = transfer.send.num_bytes(),
                       .receive_bytes = transfer.receive.num_bytes(),
                       .ticket = transfer.ticket,
                       .eager = eager ? 1U : 0U};
  const std::string announcement = eager ? "" : peer.connection->Announce(transfer);
  std::vector<iovec> body = {ObjectIovec(info)};
  if (eager) {
    body.insert(body.end(), transfer.send.entries().begin(), transfer.send.entries().end());
    transfer.sent = transfer.send.num_bytes();
    peer.counts.bytes_sent += transfer.sent;
  } else {
    body.push_back(ToIovec(announcement.data(), announcement.size()));
  }
  peer.channel.Send(MessageType::kStart, body);
}

void OpenExchanges::OnStart(Peer& peer, const StartInfo& info, std::string_view tail) {
  CheckStart(info, peer.process);
  CommunicatorState& state = communicators_[{info.destination, info.communicator}];
  peer.last_starts[info.source] = {info, agenda_.now};
  if (state.announced.try_emplace({info.source, info.plan}, agenda_.now).second) {
    agenda_.next_timer = agenda_.now;
  }
  const MeetingKey key{info.run, info.index, info.sequence, info.source};
  if (const auto waiting = state.waiting.extract(key)) {
    peer.counts.waited += Clock::now() - waiting.mapped()->exchange->started;
    return Meet(*waiting.mapped(), peer, info, tail);
  }
  CheckSameRun(state, info);
  const bool is_new =
      state.arrived.try_emplace(key, Arrival{info, peer.process, std::string(tail)}).second;
  if (!is_new) {
    Throw(ErrorCode::kTransport, "it started the same exchange twice");
  }
  CheckOrder(info);
}

void OpenExchanges::Meet(PeerTransfer& transfer, Peer& source, const StartInfo& info,
                         std::string_view tail) {
  CheckSameExchange(transfer, info);
  transfer.met = true;
  transfer.peer_ticket = info.ticket;
  if (info.eager != 0) {
    if (tail.size() != info.send_bytes) Throw(ErrorCode::kTransport, "eager bytes are missing");
    if (!transfer.reserved.empty()) Throw(ErrorCode::kTransport, kBytesTwice);
    transfer.receive.CopyIn(0, std::as_bytes(std::span(tail)));
    transfer.received = tail.size();
    source.counts.bytes_received += tail.size();
    tail = {};
  }
  if (!transfer.IsDone()) {
    source.connection->Begin(transfer, tail);
    agenda_.has_work = true;
  }
  CloseIfDone(transfer);
}

bool OpenExchanges::CloseIfDone(PeerTransfer& transfer) {
  if (!transfer.met || !transfer.IsDone()) return false;
  transfers_.erase(transfer.ticket);
  Release(*transfer.exchange);
  return true;
}

void OpenExchanges::Release(Exchange& exchange) {
  if (--exchange.open_transfers > 0) return;
  const Time ended = Clock::now();
  recorder_.Ended(exchange.id, FlightState::kCompleted, ended);
  ++completed_;
  in_flight_time_ += ended - exchange.started;
  completions_.push_back({exchange.id, std::move(exchange.request.done), nullptr});
  exchanges_.erase(exchange.id);
}

PeerTransfer* OpenExchanges::Find(uint64_t ticket) const {
  const auto found = transfers_.find(ticket);
  return found == transfers_.end() ? nullptr : found->second;
}

// `in_flight_us` is the sum over completed exchanges of the time from start to completion.
std::map<std::string, uint64_t> OpenExchanges::Stats() const {
  const auto in_flight = std::chrono::duration_cast<std::chrono::microseconds>(in_flight_time_);
  return {{"exchanges_started", started_},
          {"exchanges_completed", completed_},
          {"in_flight_us", static_cast<uint64_t>(in_flight.count())}};
}

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

// Throws if the rank has exchanges of another execution open: an exchange could meet a peer's start
// of that execution.
void OpenExchanges::CheckOverlap(const ExchangeRequest& started) const {
  // One is enough: the others have passed this check. `started` itself is the last one.
  const auto found = std::ranges::find_if(exchanges_, [&](const auto& entry) {
    const ExchangeRequest& open = entry.second.request;
    return open.rank == started.rank && !open.is_detached;
  });
  if (found == exchanges_.end()) return;
  const ExchangeRequest& open = found->second.request;
  if (open.run_id == started.run_id && open.plan == started.plan) return;
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

CommunicatorState::Position CommunicatorState::Enter(int64_t run_id, int64_t plan, int64_t index) {
  if (run_ == 0 || run_id != run_ids_.back()) {
    if (std::ranges::find(run_ids_, run_id) != run_ids_.end()) {
      Throw(ErrorCode::kUsage,
            "two executions of programs overlap on this rank: the earlier one starts this "
            "exchange after the later one has begun. ",
            kLaunchInOrder);
    }
    if (run_ids_.size() == kRememberedRuns) run_ids_.pop_front();
    run_ids_.push_back(run_id);
    ++run_;
    plan_ = plan;
    sequences_.clear();
  }
  if (plan != plan_) Throw(ErrorCode::kUsage, "one execution started exchanges of two plans");
  return {run_, sequences_[index]++};
}

bool SiblingStarts::Entry::IsEven() const {
  return std::ranges::all_of(counts | std::views::values,
                             [&](int64_t count) { return count == counts.begin()->second; });
}

void SiblingStarts::Add(const ExchangeRequest& request) {
  Leave(request);
  if (request.siblings.empty()) return;
  auto entry = std::ranges::find_if(uneven_, [&](const Entry& known) {
    return known.IsOf(request) && known.index == request.index;
  });
  if (entry == uneven_.end()) {
    entry = uneven_.insert(entry, {request.run_id, request.plan, request.index, {}});
    for (const int sibling : request.siblings) entry->counts[sibling] = 0;
  }
  ++entry->counts[request.rank];
  if (entry->IsEven()) uneven_.erase(entry);
  ForgetOldest();
}

void SiblingStarts::ForgetOldest() {
  if (uneven_.size() <= kMostExecutions) return;
  std::set<std::pair<int64_t, int64_t>> executions;
  for (const Entry& entry : uneven_) executions.insert({entry.run_id, entry.plan});
  if (executions.size() <= kMostExecutions) return;
  const Entry oldest = uneven_.front();
  std::erase_if(uneven_, [&](const Entry& entry) {
    return entry.run_id == oldest.run_id && entry.plan == oldest.plan;
  });
}

void SiblingStarts::Leave(const ExchangeRequest& request) {
  const auto is_own = [&](const Entry& entry) { return entry.IsOf(request); };
  for (auto entry = uneven_.begin(); entry != uneven_.end() && !is_own(*entry); ++entry) {
    const auto own = entry->counts.find(request.rank);
    if (own == entry->counts.end()) continue;
    const bool is_behind = own->second < std::ranges::max(entry->counts | std::views::values);
    if (is_behind) entry->counts.erase(own);
  }
  std::erase_if(uneven_, [](const Entry& entry) { return entry.IsEven(); });
}

}  // namespace jaxhet
