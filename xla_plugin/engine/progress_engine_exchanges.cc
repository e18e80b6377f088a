#include <algorithm>
#include <array>
#include <cstring>

#include "xla_plugin/base/huge_pages.h"
#include "xla_plugin/engine/message_checks.h"
#include "xla_plugin/engine/progress_engine.h"
#include "xla_plugin/engine/progress_engine_guards.h"

// Exchanges of the progress engine, from their starts to their completions.
namespace jaxhet {

using std::chrono::milliseconds;

void ProgressEngine::Start(ExchangeRequest request, int64_t id) {
  if (failure_) {
    completions_.push_back({id, std::move(request.done), failure_});
    return;
  }
  now_ = Clock::now();
  Exchange& exchange = exchanges_[id];
  exchange.request = std::move(request);
  exchange.id = id;
  exchange.started = now_;
  ++started_;
  Guarded([&] {
    try {
      StartOrThrow(exchange);
    } catch (const Error& error) {
      if (error.failed_process() >= 0) throw;
      throw Error(error.code(), Where(exchange) + std::string(error.text()), roster_.process());
    }
  });
}

void ProgressEngine::StartOrThrow(Exchange& exchange) {
  const ExchangeRequest& request = exchange.request;
  exchange.communicator = CommunicatorId(request.group);
  if (plans_.Find(request.plan) == nullptr) {
    Throw(ErrorCode::kUsage, "its plan ", request.plan, " was never registered");
  }
  Partition partition = PartitionBuffers(request);
  OpenExecution& execution = executions_[request.rank];
  if (execution.Overlaps(request.run_id, request.plan)) ThrowOverlap(exchange);
  execution.Enter(request.run_id, request.plan);
  CommunicatorState& state = CommunicatorStateOf(exchange);
  const auto position = state.Enter(request.run_id, request.plan, request.index);
  exchange.run = position.run;
  exchange.sequence = position.sequence;
  RecordStart(exchange);
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
    next_timer_ = std::min(next_timer_, DeadlineOf(transfer));
    const MeetingKey key{exchange.run, request.index, exchange.sequence, transfer.peer_rank};
    if (const auto node = state.arrived.extract(key)) {
      const Arrival& arrival = node.mapped();
      Peer& peer = peers_.at(arrival.process);
      AttributeTo(peer, [&] { Meet(transfer, peer, arrival.info, arrival.tail); });
    } else {
      state.waiting[key] = &transfer;
    }
  }
  for (const auto& [key, other] : communicators_) {
    for (const auto& [meeting, arrival] : other.arrived) CheckOrder(arrival.info);
  }
  Release(exchange);
}

void ProgressEngine::Announce(PeerTransfer& transfer) {
  const Exchange& exchange = *transfer.exchange;
  const ExchangeRequest& request = exchange.request;
  Peer& peer = PeerOf(transfer.peer_rank);
  if (peer.left) throw LeftError(Where(exchange), roster_.ProcessName(peer.process), peer.process);
  SendPlan(peer, request.plan);
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
    peer.bytes_sent += transfer.sent;
  } else {
    body.push_back(ToIovec(announcement.data(), announcement.size()));
  }
  peer.channel.Send(MessageType::kStart, body);
}

void ProgressEngine::SendPlan(Peer& peer, int64_t plan) {
  if (peer.process == roster_.process() || !peer.plans_sent.insert(plan).second) return;
  const Plan& found = *plans_.Find(plan);
  const PlanInfo info{.plan = plan, .text_bytes = found.text.size()};
  peer.channel.Send(MessageType::kPlan,
                    std::array{ObjectIovec(info), ToIovec(found.text.data(), found.text.size()),
                               ToIovec(found.program.data(), found.program.size())});
}

void ProgressEngine::OnStart(Peer& peer, const StartInfo& info, std::string_view tail) {
  CheckStart(info, PlansOf(peer.process).Find(info.plan));
  if (roster_.num_ranks() > 0) CheckRanks(info, peer.process, roster_);
  CommunicatorState& state = communicators_[{info.destination, info.communicator}];
  peer.last_starts[info.source] = {info, now_};
  if (state.announced.try_emplace({info.source, info.plan}, now_).second) next_timer_ = now_;
  const MeetingKey key{info.run, info.index, info.sequence, info.source};
  if (const auto waiting = state.waiting.extract(key)) {
    peer.waited += Clock::now() - waiting.mapped()->exchange->started;
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

void ProgressEngine::Meet(PeerTransfer& transfer, Peer& source, const StartInfo& info,
                          std::string_view tail) {
  CheckSameExchange(transfer, info);
  transfer.met = true;
  transfer.peer_ticket = info.ticket;
  if (info.eager != 0) {
    if (tail.size() != info.send_bytes) Throw(ErrorCode::kTransport, "eager bytes are missing");
    if (!transfer.reserved.empty()) Throw(ErrorCode::kTransport, kBytesTwice);
    transfer.receive.CopyIn(0, std::as_bytes(std::span(tail)));
    transfer.received = tail.size();
    source.bytes_received += tail.size();
    tail = {};
  }
  if (!transfer.IsDone()) {
    source.connection->Begin(transfer, tail);
    has_work_ = true;
  }
  CloseIfDone(transfer);
}

void ProgressEngine::CloseIfDone(PeerTransfer& transfer) {
  if (!transfer.met || !transfer.IsDone()) return;
  transfers_.erase(transfer.ticket);
  Peer& peer = PeerOf(transfer.peer_rank);
  Release(*transfer.exchange);
  if (peer.left) AnswerGoodbye(peer);
}

void ProgressEngine::Release(Exchange& exchange) {
  if (--exchange.open_transfers > 0) return;
  const Time ended = Clock::now();
  RecordEnd(exchange, FlightState::kCompleted, ended);
  ++completed_;
  in_flight_time_ += ended - exchange.started;
  executions_.at(exchange.request.rank).Leave();
  completions_.push_back({exchange.id, std::move(exchange.request.done), nullptr});
  exchanges_.erase(exchange.id);
}

void ProgressEngine::RecordStart(Exchange& exchange) {
  recorder_.Started(RecordOf(exchange));
  if (!ranges_) return;
  const ExchangeRequest& request = exchange.request;
  const std::string name = plans_.Describe(request.plan, request.index);
  exchange.range = ranges_->start(StrCat("jaxhet rank ", request.rank, ": ", name).c_str());
}

void ProgressEngine::RecordEnd(const Exchange& exchange, FlightState state, Time now) {
  recorder_.Ended(exchange.id, state, now);
  if (ranges_ && exchange.range) ranges_->end(*exchange.range);
}

Time ProgressEngine::DeadlineOf(const PeerTransfer& transfer) const {
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

CommunicatorState& ProgressEngine::CommunicatorStateOf(const Exchange& exchange) {
  return communicators_[{exchange.request.rank, exchange.communicator}];
}

}  // namespace jaxhet
