#include "xla_plugin/engine/host/open_exchanges.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "xla_plugin/base/huge_pages.h"
#include "xla_plugin/engine/host/partition.h"

namespace jaxhet {

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
  executions_.clear();
  siblings_.Clear();
}

void OpenExchanges::StartOrThrow(Exchange& exchange) {
  const ExchangeRequest& request = exchange.request;
  exchange.communicator = CommunicatorId(request.group);
  if (peers_.plans().Find(request.plan) == nullptr) {
    Throw(ErrorCode::kUsage, "its plan ", request.plan, " was never registered");
  }
  Partition partition = PartitionBuffers(request);
  OpenExecution& execution = executions_[request.rank];
  if (execution.Overlaps(request.run_id, request.plan)) ThrowOverlap(exchange);
  if (!request.is_detached) execution.Enter(request.run_id, request.plan);
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
    peer.bytes_sent += transfer.sent;
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
    source.bytes_received += tail.size();
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
  if (!exchange.request.is_detached) executions_.at(exchange.request.rank).Leave();
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

}  // namespace jaxhet
