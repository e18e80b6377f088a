#include "xla_plugin/engine/progress_engine.h"

#include <sys/epoll.h>

#include <algorithm>

namespace jaxhet {

using std::chrono::milliseconds;

namespace {

// Unread messages about channels. A process has hundreds of channels, with several messages each.
constexpr size_t kMostChannelMessages = 1 << 16;
constexpr milliseconds kBusyPeriod{5};           // between polls of a peer that leaves
constexpr std::chrono::seconds kArrivalTime{1};  // from slots or sockets into a result

void CheckEmpty(std::string_view body) {
  if (body.empty()) return;
  Throw(ErrorCode::kTransport, "a message is ", body.size(), " bytes too long");
}

void AddPlanOf(Peer& peer, std::string_view body) {
  const auto info = TakeInfo<PlanInfo>(body);
  const std::string_view text = TakeBytes(body, info.text_bytes);
  if (peer.plans.Find(info.plan) != nullptr) {
    Throw(ErrorCode::kTransport, "it sent the plan ", info.plan, " twice");
  }
  peer.plans.Add(info.plan, text, body);
}

void AddChannelMessage(std::vector<ChannelMessage>& messages, int process, std::string_view body) {
  if (messages.size() == kMostChannelMessages) {
    Throw(ErrorCode::kTransport, "it sends messages about device channels without end");
  }
  messages.push_back({process, std::string(body)});
}

}  // namespace

ProgressEngine::ProgressEngine(int process, int num_processes, const Options& options)
    : options_(options),
      least_severity_(LeastSeverity(options.log_level)),
      peers_(process, num_processes, options_, *this),
      exchanges_(peers_, agenda_, options_) {}

// Runs a part of the engine; its error fails the engine.
template <typename Function>
void ProgressEngine::Guarded(Function function) {
  try {
    function();
  } catch (const Error& error) {
    Fail(error);
  } catch (...) {  // nor may the progress thread end
    const Error error = CurrentError();
    Fail(Error(error.code(), StrCat("[", peers_.roster().OwnName(), "] ", error.text())));
  }
}

// Calls `function`. If its error names no process, the error is about `peer`.
template <typename Function>
void ProgressEngine::Attributed(const Peer& peer, Function function) {
  AttributeTo(peer.process, [&] { return ContextOf(peer.process); }, function);
}

void ProgressEngine::Invite(PeerSpec spec, Newcomers& newcomers) {
  newcomers.introductions.push_back(peers_.Make(std::move(spec), newcomers.peers));
}

std::set<Pollable*> ProgressEngine::Admit(Newcomers& newcomers, Time silent_until) {
  std::set<Pollable*> pollables;
  agenda_.now = Clock::now();
  for (auto& [process, peer] : newcomers.peers) {
    peer.last_heard = std::max(agenda_.now, silent_until);
    pollables.merge(peer.Pollables());
    if (failure_) {
      SayEnd(peer);
    } else if (devices_ != nullptr) {
      for (const auto& [plan, text] : peers_.plans().all()) peers_.SendPlan(peer, plan);
    }
  }
  peers_.Merge(newcomers.peers);
  agenda_.has_work = true;
  return pollables;
}

void ProgressEngine::SetRanks(std::vector<RankInfo> ranks) {
  peers_.SetRanks(std::move(ranks));
  if (!failure_) Guarded([&] { exchanges_.CheckRanksOfStarts(); });
}

void ProgressEngine::Start(ExchangeRequest request, int64_t id) {
  if (failure_) return exchanges_.Refuse(std::move(request), id, failure_);
  agenda_.now = Clock::now();
  Guarded([&] { exchanges_.Start(std::move(request), id); });
}

void ProgressEngine::Lose(int rank, std::string_view why) {
  peers_.OfRank(rank).Lost(why);
  agenda_.has_work = true;
}

Transfer& ProgressEngine::FindTransfer(const Peer& peer, uint64_t ticket) {
  PeerTransfer* const transfer = exchanges_.Find(ticket);
  if (transfer == nullptr || &peers_.OfRank(transfer->peer_rank) != &peer) {
    Throw(ErrorCode::kTransport, "it names the transfer ", ticket, ", which is not open");
  }
  return *transfer;
}

void ProgressEngine::Moved(Peer& peer, Transfer& transfer) {
  if (!exchanges_.CloseIfDone(static_cast<PeerTransfer&>(transfer))) return;
  if (peer.left) AnswerGoodbye(peer);
}

void ProgressEngine::PathChanged(const Peer& peer, std::string_view what) {
  if (least_severity_ > Severity::kWarning) return;
  LogLine(StrCat("jaxhet: ", peers_.Where(peer.process), what));
}

void ProgressEngine::PublishPlan(int64_t plan) {
  if (failure_) return;
  for (auto& [process, peer] : peers_.all()) peers_.SendPlan(peer, plan);
}

void ProgressEngine::SendChannelMessage(int process, std::string_view body) {
  if (!failure_) peers_.all().at(process).channel.Send(MessageType::kDeviceChannel, body);
}

std::vector<ChannelMessage> ProgressEngine::TakeChannelMessages(
    const std::function<bool(const ChannelMessage&)>& want) {
  std::vector<ChannelMessage> left;
  std::vector<ChannelMessage> taken;
  for (ChannelMessage& message : channel_messages_) {
    (want(message) ? taken : left).push_back(std::move(message));
  }
  channel_messages_ = std::move(left);
  return taken;
}

void ProgressEngine::OnMessage(Peer& peer, const Message& message) {
  std::string_view body = message.body;
  if (peer.left) Throw(ErrorCode::kTransport, "it has left the job and still sends messages");
  switch (message.type) {
    case MessageType::kPlan:
      return AddPlanOf(peer, body);
    case MessageType::kStart: {
      const auto info = TakeInfo<StartInfo>(body);
      return exchanges_.OnStart(peer, info, body);
    }
    case MessageType::kTransport:
      if (!peer.connection) {
        Throw(ErrorCode::kTransport, "it sent a message about a path that was not agreed on");
      }
      return peer.connection->OnMessage(std::as_bytes(std::span(body)));
    case MessageType::kHeartbeat:
      return CheckEmpty(body);
    case MessageType::kFail: {
      const Error error = ParseFail(body);
      if (error.failed_process() < 0 || error.failed_process() >= peers_.roster().num_processes()) {
        Throw(ErrorCode::kTransport, "it reports a failure of process ", error.failed_process(),
              ", which does not exist: ", error.text());
      }
      heard_failure_ = true;
      throw Error(error);
    }
    case MessageType::kGoodbye:
      CheckEmpty(body);
      peer.left = true;
      exchanges_.CheckLeft(peer);
      return AnswerGoodbye(peer);
    case MessageType::kDeviceChannel:
      return AddChannelMessage(channel_messages_, peer.process, body);
    case MessageType::kHello:
    case MessageType::kHelloReply:
      Throw(ErrorCode::kTransport, "it introduced itself twice");
    default:
      Throw(ErrorCode::kTransport, "it sent a message of the unknown type ", message.type);
  }
}

void ProgressEngine::Fail(const Error& error) {
  if (failure_) return;
  const int failed_process =
      error.failed_process() >= 0 ? error.failed_process() : peers_.roster().process();
  const auto why = std::make_shared<const Error>(error.code(), error.text(), failed_process);
  if (!heard_failure_) LogLine(why->what());
  End(why);
}

void ProgressEngine::SayGoodbye() {
  if (failure_) return;
  if (HasExchanges()) return Fail(UnderWayError(exchanges_.WhereFirst()));
  said_goodbye_ = true;
  End(std::make_shared<const Error>(ErrorCode::kUsage, "this process has left the job"));
}

void ProgressEngine::End(std::shared_ptr<const Error> why) {
  failure_ = std::move(why);
  peers_.SetFailed();
  exchanges_.Drop(failure_);
  for (auto& [process, peer] : peers_.all()) {
    if (said_goodbye_ || process != peers_.roster().process()) SayEnd(peer);
  }
}

// Tells the peer why nothing follows.
void ProgressEngine::SayEnd(Peer& peer) const {
  if (!said_goodbye_) return peer.SayFailure(*failure_, peers_.roster().process());
  peer.channel.Send(MessageType::kGoodbye);
  peer.channel.FinishSending();
}

void ProgressEngine::ServeOwn() {
  if (failure_) return;
  Guarded([&] { ReadMessages(peers_.self()); });
}

void ProgressEngine::ReadMessages(Peer& peer) {
  // A peer that failed has told why, and then closed its data connections. Their end may be known
  // here before the poll says that there is something to read.
  Socket* const socket = peer.channel.socket();  // none to this process itself
  if (socket != nullptr && !peer.lost.empty()) socket->OnEvents(EPOLLIN);
  Attributed(peer, [&] {
    while (const auto message = peer.channel.Next()) {
      peer.last_heard = agenda_.now;
      OnMessage(peer, *message);
    }
  });
  if (peer.channel.closed() && !peer.left) {
    peer.Lost(StrCat("the control connection ended: ", peer.channel.socket()->close_reason()));
  }
}

void ProgressEngine::Pass() {
  agenda_.now = Clock::now();
  const Time last_pass = std::exchange(last_pass_, agenda_.now);
  // If this process itself was stopped, the silence says nothing about the peers.
  if (agenda_.now - last_pass >
      milliseconds(options_.heartbeat_ms + options_.peer_timeout_ms / 2)) {
    for (auto& [process, peer] : peers_.all()) {
      peer.last_heard = std::max(peer.last_heard, agenda_.now);
    }
  }
  agenda_.has_work = false;
  if (failure_) {
    Discard();
  } else {
    Guarded([&] {
      for (auto& [process, peer] : peers_.all()) ReadMessages(peer);
      for (auto& [process, peer] : peers_.all()) CheckPeer(peer);
      for (auto& [process, peer] : peers_.all()) {
        // A peer that has left may close its data connections, which then is no failure.
        if (peer.left && !WaitsFor(process)) continue;
        if (peer.connection) {
          Attributed(peer, [&] { agenda_.has_work |= peer.connection->Advance(); });
        }
        agenda_.has_work |= !peer.lost.empty() && !peer.left;
      }
      ReadMessages(peers_.self());
      CheckTimers();
    });
  }
  for (auto& [process, peer] : peers_.all()) peer.channel.Flush();
}

// Reads on after the end of this engine, to see when the others end.
void ProgressEngine::Discard() {
  for (auto& [process, peer] : peers_.all()) {
    try {
      while (peer.channel.Next()) {
      }
    } catch (const Error&) {
      peer.left = true;
    }
  }
}

void ProgressEngine::CheckTimers() {
  if (agenda_.now < agenda_.next_timer) return;
  const bool beat = agenda_.now >= next_heartbeat_;
  if (beat) next_heartbeat_ = agenda_.now + milliseconds(options_.heartbeat_ms);
  agenda_.next_timer = next_heartbeat_;
  exchanges_.CheckDeadlines();
  for (auto& [process, peer] : peers_.all()) {
    if (process == peers_.roster().process()) continue;
    if (peer.left) {
      AnswerGoodbye(peer);
      continue;
    }
    if (beat) peer.channel.Send(MessageType::kHeartbeat);
    const auto silence = std::chrono::duration_cast<milliseconds>(agenda_.now - peer.last_heard);
    if (silence.count() <= options_.peer_timeout_ms) continue;
    peer.Lost(StrCat("it has been silent for ", silence.count(), " ms"));
    CheckPeer(peer);
  }
}

// Answers once all that the peer has sent is here: it closes its sockets then.
void ProgressEngine::AnswerGoodbye(Peer& peer) {
  if (!WaitsFor(peer.process)) return peer.channel.FinishSending();
  agenda_.next_timer = std::min(agenda_.next_timer, agenda_.now + kBusyPeriod);
}

// Called when all that `peer` has sent was read.
void ProgressEngine::CheckPeer(Peer& peer) {
  if (peer.left) {
    if (!WaitsInVain(peer)) return;
    throw LeftError(ContextOf(peer.process), peers_.roster().ProcessName(peer.process),
                    peer.process);
  }
  if (peer.lost.empty()) return;
  throw LostError(ContextOf(peer.process), peer.lost, peer.process);
}

// Whether something waits for a peer that has left. Data for devices may still be in a channel's
// slots or sockets.
bool ProgressEngine::WaitsInVain(const Peer& peer) {
  if (!peer.lost.empty() && exchanges_.With(peer.process) != nullptr) return true;
  if (!peer.channel.closed()) return false;
  const auto wait = DeviceWaitFor(peer.process);
  if (!wait) return false;
  agenda_.next_timer = std::min(agenda_.next_timer, agenda_.now + kBusyPeriod);
  return wait->since < agenda_.now - kArrivalTime;
}

std::optional<DeviceWait> ProgressEngine::DeviceWaitFor(int process) const {
  if (devices_ == nullptr) return std::nullopt;
  return devices_->OldestWait(peers_.roster().RanksOf(process));
}

std::string ProgressEngine::ContextOf(int process) const {
  const auto wait = exchanges_.With(process) == nullptr ? DeviceWaitFor(process) : std::nullopt;
  if (!wait) return exchanges_.ContextOf(process);
  return StrCat(WhereText(peers_.FactsOf(wait->rank, wait->plan, wait->index)),
                peers_.roster().RankAndProcess(wait->peer_rank), ": ");
}

bool ProgressEngine::IsQuiet() const {
  return std::ranges::all_of(peers_.all(), [&](const auto& entry) {
    const auto& [process, peer] = entry;
    return process == peers_.roster().process() || process == failure_->failed_process() ||
           peer.left || peer.channel.closed();
  });
}

std::map<std::string, uint64_t> ProgressEngine::Stats() const {
  std::map<std::string, uint64_t> stats = exchanges_.Stats();
  for (const auto& [process, peer] : peers_.all()) {
    stats["bytes_sent_" + peer.counts.transport] += peer.counts.bytes_sent;
    stats["bytes_received_" + peer.counts.transport] += peer.counts.bytes_received;
  }
  return stats;
}

}  // namespace jaxhet
