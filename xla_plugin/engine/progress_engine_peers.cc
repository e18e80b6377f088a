#include <algorithm>

#include "xla_plugin/engine/message_checks.h"
#include "xla_plugin/engine/progress_engine.h"

// Peers of the progress engine: how they join and leave.
namespace jaxhet {

using std::chrono::milliseconds;

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

// Why nothing follows.
void ProgressEngine::SayEnd(Peer& peer) const {
  if (!said_goodbye_) return peer.SayFailure(*failure_, roster_.process());
  peer.channel.Send(MessageType::kGoodbye);
  peer.channel.FinishSending();
}

bool ProgressEngine::IsQuiet() const {
  return std::ranges::all_of(peers_, [&](const auto& entry) {
    const auto& [process, peer] = entry;
    return process == roster_.process() || process == failure_->failed_process() || peer.left ||
           peer.channel.closed();
  });
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

const Plans& ProgressEngine::PlansOf(int process) const {
  return process == roster_.process() ? plans_ : peers_.at(process).plans;
}

}  // namespace jaxhet
