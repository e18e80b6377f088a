#include "xla_plugin/engine/progress_engine.h"

#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/huge_pages.h"
#include "xla_plugin/engine/message_checks.h"
#include "xla_plugin/transport/local/local.h"

namespace jaxhet {

using std::chrono::milliseconds;

namespace {

// Unread messages about channels. A process has hundreds of channels, with several messages each.
constexpr size_t kMostChannelMessages = 1 << 16;

void AddPlanOf(Peer& peer, std::string_view body) {
  const auto info = TakeInfo<PlanInfo>(body);
  const std::string_view text = TakeBytes(body, info.text_bytes);
  if (peer.plans.Find(info.plan) != nullptr) {
    Throw(ErrorCode::kTransport, "it sent the plan ", info.plan, " twice");
  }
  peer.plans.Add(info.plan, text, body);
}

void AddChannelMessage(std::vector<ProgressEngine::ChannelMessage>& messages, int process,
                       std::string_view body) {
  if (messages.size() == kMostChannelMessages) {
    Throw(ErrorCode::kTransport, "it sends messages about device channels without end");
  }
  messages.push_back({process, std::string(body)});
}

}  // namespace

// Runs a part of the engine; its error fails the engine.
template <typename Function>
void ProgressEngine::Guarded(Function function) {
  try {
    function();
  } catch (const Error& error) {
    Fail(error);
  } catch (...) {  // nor may the progress thread end
    const Error error = CurrentError();
    Fail(Error(error.code(), StrCat("[", roster_.OwnName(), "] ", error.text())));
  }
}

// Adds to an error of `function` that names no process yet the name of `peer`.
template <typename Function>
void ProgressEngine::AttributeTo(Peer& peer, Function function) {
  try {
    function();
  } catch (const Error& error) {
    if (error.failed_process() >= 0) throw;
    throw Error(error.code(),
                StrCat(Where(peer.process), error.text(), MovedText(Moved(peer.process))),
                peer.process);
  }
}

ProgressEngine::ProgressEngine(int process, int num_processes, const Options& options)
    : options_(options),
      encryption_(ParseEncryption(options.encryption)),
      least_severity_(LeastSeverity(options.log_level)),
      roster_(process, num_processes),
      nics_(options.verbs),
      ranges_(options.profiler_ranges != 0 ? std::optional(LoadProfilerRanges()) : std::nullopt) {
  if (encryption_ != Encryption::kOff) Crypto(encryption_);
  Peer& self = peers_.try_emplace(process, *this, process, ControlChannel()).first->second;
  self.connection = OpenLocal(self);
  self.transport = "local";
}

ProgressEngine::~ProgressEngine() = default;

void ProgressEngine::AddPeer(PeerSpec spec) {
  introductions_.push_back(MakePeer(std::move(spec), peers_));
}

// Adds it to `peers`.
Introduction ProgressEngine::MakePeer(PeerSpec spec, std::map<int, Peer>& peers) {
  if (spec.process < 0 || spec.process >= roster_.num_processes()) {
    Throw(ErrorCode::kUsage, "there is no process ", spec.process, " in a job of ",
          roster_.num_processes());
  }
  auto keys = KeysFor(encryption_, 1 + spec.data.size(), std::move(spec.keys));
  if (peers_.contains(spec.process)) {
    Throw(ErrorCode::kUsage, "process ", spec.process, " was added twice");
  }
  const auto place =
      peers
          .try_emplace(spec.process, *this, spec.process,
                       ControlChannel(std::move(spec.control), std::move(keys.front())))
          .first;
  keys.erase(keys.begin());
  place->second.same_host = spec.same_host;
  place->second.device_transports = std::move(spec.device_transports);
  roster_.Describe(spec.process, spec.description);
  return {.peer = &place->second,
          .error_prefix = Where(spec.process),
          .allowed = std::move(spec.transports),
          .refused = std::move(spec.refused),
          .same_host = spec.same_host,
          .chunk_bytes = static_cast<size_t>(options_.chunk_bytes),
          // A process that is silent altogether is to be found first.
          .path_timeout = milliseconds(options_.peer_timeout_ms + 2 * options_.heartbeat_ms),
          .page = &page_,
          .nics = &nics_,
          .data_fds = std::move(spec.data),
          .data_keys = std::move(keys),
          .encryption = encryption_};
}

void ProgressEngine::Connect(Time deadline) {
  now_ = Clock::now();
  try {
    Negotiate(roster_.process(), introductions_, deadline,
              [&](const Error& error) { Fail(error); });
  } catch (const Error&) {
    throw Error(*failure_);
  }
  introductions_.clear();
  const bool has_all = std::ssize(peers_) == roster_.num_processes();
  if (has_all) {  // nobody joins later
    nics_.Release();
    page_.memory().CloseFd();
  }
  now_ = Clock::now();
  next_heartbeat_ = next_timer_ = now_;
  // A peer that is not done with the others yet is silent for as long as that may take.
  for (auto& [process, peer] : peers_) peer.last_heard = std::max(now_, deadline);
}

std::set<Pollable*> ProgressEngine::Pollables() {
  std::set<Pollable*> pollables;
  for (auto& [process, peer] : peers_) pollables.merge(PollablesOf(peer));
  return pollables;
}

std::set<Pollable*> ProgressEngine::PollablesOf(Peer& peer) {
  std::set<Pollable*> pollables;
  if (Pollable* const control = peer.channel.socket()) pollables.insert(control);
  if (!peer.connection) return pollables;
  for (Pollable* const pollable : peer.connection->Pollables()) pollables.insert(pollable);
  return pollables;
}

void Newcomer::Introduce(int own_process, Time deadline) {
  Negotiate(own_process, introduction, deadline, [&](const Error& error) {
    for (auto& [process, joining] : peer) joining.SayFailure(error, own_process);
  });
}

void ProgressEngine::Invite(PeerSpec spec, Newcomer& newcomer) {
  newcomer.introduction.push_back(MakePeer(std::move(spec), newcomer.peer));
}

std::set<Pollable*> ProgressEngine::Admit(Newcomer& newcomer) {
  std::set<Pollable*> pollables;
  now_ = Clock::now();
  for (auto& [process, peer] : newcomer.peer) {
    peer.last_heard = now_;
    pollables.merge(PollablesOf(peer));
    if (failure_) SayEnd(peer);
  }
  peers_.merge(newcomer.peer);  // which moves none
  has_work_ = true;
  return pollables;
}

// A peer that is ahead may have started exchanges before the ranks were known here.
void ProgressEngine::SetRanks(std::vector<RankInfo> ranks) {
  roster_.SetRanks(std::move(ranks));
  if (failure_) return;
  Guarded([&] {
    for (const auto& [own, state] : communicators_) {
      for (const auto& [key, arrival] : state.arrived) {
        AttributeTo(peers_.at(arrival.process),
                    [&] { CheckRanks(arrival.info, arrival.process, roster_); });
      }
    }
  });
}

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
  for (const iovec& piece : partition.padding.pieces()) {
    std::memset(piece.iov_base, 0, piece.iov_len);
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
    body.insert(body.end(), transfer.send.pieces().begin(), transfer.send.pieces().end());
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

void ProgressEngine::AddPlan(int64_t plan, std::string_view text, std::string_view program) {
  const bool is_too_long = program.size() > kMaxProgramBytes;
  plans_.Add(plan, text, is_too_long ? std::string_view() : program);
}

void ProgressEngine::PublishPlan(int64_t plan) {
  if (failure_) return;
  for (auto& [process, peer] : peers_) SendPlan(peer, plan);
}

void ProgressEngine::SendChannelMessage(int process, std::span<const iovec> body) {
  if (!failure_) peers_.at(process).channel.Send(MessageType::kDeviceChannel, body);
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

void ProgressEngine::OnMessage(Peer& peer, const Message& message) {
  std::string_view body = message.body;
  if (peer.left) Throw(ErrorCode::kTransport, "it has left the job and still sends messages");
  switch (message.type) {
    case MessageType::kPlan:
      return AddPlanOf(peer, body);
    case MessageType::kStart: {
      const auto info = TakeInfo<StartInfo>(body);
      return OnStart(peer, info, body);
    }
    case MessageType::kTransport:
      return peer.connection->OnMessage(std::as_bytes(std::span(body)));
    case MessageType::kHeartbeat:
      return CheckEmpty(body);
    case MessageType::kFail: {
      const Error error = ParseFail(body);
      CheckFailedProcess(error, roster_);
      heard_failure_ = true;
      throw Error(error);
    }
    case MessageType::kGoodbye:
      CheckEmpty(body);
      return OnGoodbye(peer);
    case MessageType::kDeviceChannel:
      return AddChannelMessage(channel_messages_, peer.process, body);
    case MessageType::kHello:
    case MessageType::kHelloReply:
      Throw(ErrorCode::kTransport, "it introduced itself twice");
  }
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

void ProgressEngine::OnGoodbye(Peer& peer) {
  peer.left = true;
  for (const auto& [ticket, transfer] : transfers_) {
    if (transfer->met || PeerOf(transfer->peer_rank).process != peer.process) continue;
    throw LeftError(Where(*transfer->exchange), roster_.ProcessName(peer.process), peer.process);
  }
  AnswerGoodbye(peer);
}

// The peer closes its sockets then: not before what it has sent is all here.
void ProgressEngine::AnswerGoodbye(Peer& peer) {
  if (!WaitsFor(peer.process)) return peer.channel.FinishSending();
  next_timer_ = std::min(next_timer_, now_ + kBusyPeriod);
}

void ProgressEngine::SetFailedAndDrop() {
  page_.SetFailed();
  for (auto& [id, exchange] : exchanges_) {
    RecordEnd(exchange, FlightState::kFailed, Clock::now());
    completions_.push_back({id, std::move(exchange.request.done), failure_});
  }
  exchanges_.clear();
  transfers_.clear();
  communicators_.clear();
  executions_.clear();
}

void ProgressEngine::Fail(const Error& error) {
  if (failure_) return;
  const int failed_process =
      error.failed_process() >= 0 ? error.failed_process() : roster_.process();
  failure_ = std::make_shared<const Error>(error.code(), error.text(), failed_process);
  if (!heard_failure_) LogLine(failure_->what());
  SetFailedAndDrop();
  for (auto& [process, peer] : peers_) {
    if (process != roster_.process()) SayEnd(peer);
  }
}

// Why nothing follows.
void ProgressEngine::SayEnd(Peer& peer) const {
  if (!said_goodbye_) return peer.SayFailure(*failure_, roster_.process());
  peer.channel.Send(MessageType::kGoodbye);
  peer.channel.FinishSending();
}

void ProgressEngine::SayGoodbye() {
  if (failure_) return;
  if (!exchanges_.empty()) {
    return Fail(UnderWayError(Where(exchanges_.begin()->second)));
  }
  said_goodbye_ = true;
  failure_ = std::make_shared<const Error>(ErrorCode::kUsage, "this process has left the job");
  SetFailedAndDrop();
  for (auto& [process, peer] : peers_) SayEnd(peer);
}

void ProgressEngine::ServeOwn() {
  if (failure_) return;
  Guarded([&] { ReadMessages(peers_.at(roster_.process())); });
}

void ProgressEngine::ReadMessages(Peer& peer) {
  // A peer that failed has told why, and then closed its data connections. Their end may be known
  // here before the poll says that there is something to read.
  Socket* const socket = peer.channel.socket();  // none to this process itself
  if (socket != nullptr && !peer.lost.empty()) socket->OnEvents(EPOLLIN);
  AttributeTo(peer, [&] {
    while (const auto message = peer.channel.Next()) {
      peer.last_heard = now_;
      OnMessage(peer, *message);
    }
  });
  if (peer.channel.closed() && !peer.left) {
    peer.Lost(StrCat("the control connection ended: ", peer.channel.socket()->close_reason()));
  }
}

void ProgressEngine::Pass() {
  now_ = Clock::now();
  const Time last_pass = std::exchange(last_pass_, now_);
  // This process itself was stopped: that nothing was heard means nothing.
  if (now_ - last_pass > milliseconds(options_.heartbeat_ms + options_.peer_timeout_ms / 2)) {
    for (auto& [process, peer] : peers_) peer.last_heard = std::max(peer.last_heard, now_);
  }
  has_work_ = false;
  if (failure_) {
    Discard();
  } else {
    Guarded([&] {
      for (auto& [process, peer] : peers_) ReadMessages(peer);
      for (auto& [process, peer] : peers_) CheckPeer(peer);
      for (auto& [process, peer] : peers_) {
        // A peer that has left may close its data connections, which then is no failure.
        if (peer.left && !WaitsFor(process)) continue;
        AttributeTo(peer, [&] { has_work_ |= peer.connection->Advance(); });
        has_work_ |= !peer.lost.empty() && !peer.left;
      }
      ReadMessages(peers_.at(roster_.process()));
      CheckTimers();
    });
  }
  for (auto& [process, peer] : peers_) peer.channel.Flush();
}

// After the end, only that of the others is of interest.
void ProgressEngine::Discard() {
  for (auto& [process, peer] : peers_) {
    try {
      while (peer.channel.Next()) {
      }
    } catch (const Error&) {
      peer.left = true;
    }
  }
}

void ProgressEngine::CheckTimers() {
  if (now_ < next_timer_) return;
  const bool beat = now_ >= next_heartbeat_;
  if (beat) next_heartbeat_ = now_ + milliseconds(options_.heartbeat_ms);
  next_timer_ = next_heartbeat_;
  for (const auto& [id, exchange] : exchanges_) {
    for (const PeerTransfer& transfer : exchange.transfers) {
      const Time deadline = DeadlineOf(transfer);
      if (now_ >= deadline) ThrowLate(exchange);
      next_timer_ = std::min(next_timer_, deadline);
    }
  }
  for (auto& [process, peer] : peers_) {
    if (process == roster_.process()) continue;
    if (peer.left) {
      AnswerGoodbye(peer);
      continue;
    }
    if (beat) peer.channel.Send(MessageType::kHeartbeat);
    const auto silence = std::chrono::duration_cast<milliseconds>(now_ - peer.last_heard);
    if (silence.count() <= options_.peer_timeout_ms) continue;
    peer.Lost(StrCat("it has been silent for ", silence.count(), " ms"));
    CheckPeer(peer);
  }
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

bool ProgressEngine::IsQuiet() const {
  return std::ranges::all_of(peers_, [&](const auto& entry) {
    const auto& [process, peer] = entry;
    return process == roster_.process() || process == failure_->failed_process() || peer.left ||
           peer.channel.closed();
  });
}

// `in_flight_us` is the sum over completed exchanges of the time from start to completion.
std::map<std::string, uint64_t> ProgressEngine::Stats() const {
  const auto in_flight = std::chrono::duration_cast<std::chrono::microseconds>(in_flight_time_);
  std::map<std::string, uint64_t> stats = {
      {"exchanges_started", started_},
      {"exchanges_completed", completed_},
      {"in_flight_us", static_cast<uint64_t>(in_flight.count())}};
  for (const auto& [process, peer] : peers_) {
    stats["bytes_sent_" + peer.transport] += peer.bytes_sent;
    stats["bytes_received_" + peer.transport] += peer.bytes_received;
  }
  return stats;
}

std::vector<PeerCounts> ProgressEngine::CountsOfPeers() const {
  std::vector<PeerCounts> counts;
  for (const auto& [process, peer] : peers_) {
    const auto waited = std::chrono::duration_cast<std::chrono::microseconds>(peer.waited);
    counts.push_back({.process = process,
                      .transport = peer.transport,
                      .bytes_sent = peer.bytes_sent,
                      .bytes_received = peer.bytes_received,
                      .waited_us = static_cast<uint64_t>(waited.count()),
                      .path_failures = peer.path_failures});
  }
  return counts;
}

const Peer& ProgressEngine::peer(int process) const {
  const auto found = peers_.find(process);
  if (found == peers_.end()) Throw(ErrorCode::kUsage, "process ", process, " is not connected");
  return found->second;
}

Peer& ProgressEngine::PeerOf(int rank) {
  const auto found = peers_.find(roster_.ProcessOf(rank));
  if (found == peers_.end()) Throw(ErrorCode::kUsage, "rank ", rank, " is not connected");
  return found->second;
}

CommunicatorState& ProgressEngine::CommunicatorStateOf(const Exchange& exchange) {
  return communicators_[{exchange.request.rank, exchange.communicator}];
}

const Plans& ProgressEngine::PlansOf(int process) const {
  return process == roster_.process() ? plans_ : peers_.at(process).plans;
}

}  // namespace jaxhet
