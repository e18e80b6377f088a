#include "xla_plugin/engine/progress_engine.h"

#include <sys/epoll.h>

#include <algorithm>

#include "xla_plugin/engine/message_checks.h"
#include "xla_plugin/engine/progress_engine_guards.h"
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

}  // namespace jaxhet
