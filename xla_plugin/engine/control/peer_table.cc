#include "xla_plugin/engine/control/peer_table.h"

#include <array>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"

namespace jaxhet {

using std::chrono::milliseconds;

PeerTable::PeerTable(int process, int num_processes, const Options& options, PeerEvents& events)
    : options_(options),
      events_(events),
      encryption_(ParseEncryption(options.encryption)),
      roster_(process, num_processes),
      nics_(options.verbs) {
  if (encryption_ != Encryption::kOff) Crypto(encryption_);
  Peer& self = peers_.try_emplace(process, events, process, ControlChannel()).first->second;
  self.connection = OpenLocal(self);
  self.counts.transport = "local";
}

Introduction PeerTable::Make(PeerSpec spec, std::map<int, Peer>& peers) {
  if (spec.process < 0 || spec.process >= roster_.num_processes()) {
    Throw(ErrorCode::kUsage, "there is no process ", spec.process, " in a job of ",
          roster_.num_processes());
  }
  auto keys = KeysFor(encryption_, 1 + spec.data.size(), std::move(spec.keys));
  if (peers_.contains(spec.process) || peers.contains(spec.process)) {
    Throw(ErrorCode::kUsage, "process ", spec.process, " was added twice");
  }
  const auto place =
      peers
          .try_emplace(spec.process, events_, spec.process,
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
          .setup = {.same_host = spec.same_host,
                    .memory_state = &memory_state_,
                    .nics = &nics_,
                    .encryption = encryption_,
                    .sockets = {.control_fd = place->second.channel.socket()->fd(),
                                .data = std::move(spec.data),
                                .keys = std::move(keys),
                                .chunk_bytes = static_cast<size_t>(options_.chunk_bytes),
                                .path_timeout = PathTimeout(options_)}}};
}

void PeerTable::Merge(std::map<int, Peer>& peers) {
  peers_.merge(peers);
  const bool has_all = std::ssize(peers_) == roster_.num_processes();
  if (has_all) nics_.Release();
}

void PeerTable::AddPlan(int64_t plan, std::string_view text, std::string_view program) {
  const bool is_too_long = program.size() > kMaxProgramBytes;
  plans_.Add(plan, text, is_too_long ? std::string_view() : program);
}

void PeerTable::SendPlan(Peer& peer, int64_t plan) const {
  if (peer.process == roster_.process() || !peer.plans_sent.insert(plan).second) return;
  const Plan& found = *plans_.Find(plan);
  const PlanInfo info{.plan = plan, .text_bytes = found.text.size()};
  peer.channel.Send(MessageType::kPlan,
                    std::array{ObjectIovec(info), ToIovec(found.text.data(), found.text.size()),
                               ToIovec(found.program.data(), found.program.size())});
}

const Peer& PeerTable::Of(int process) const {
  const auto found = peers_.find(process);
  if (found == peers_.end()) Throw(ErrorCode::kUsage, "process ", process, " is not connected");
  return found->second;
}

Peer& PeerTable::OfRank(int rank) {
  const auto found = peers_.find(roster_.ProcessOf(rank));
  if (found == peers_.end()) Throw(ErrorCode::kUsage, "rank ", rank, " is not connected");
  return found->second;
}

const Plans& PeerTable::PlansOf(int process) const {
  return process == roster_.process() ? plans_ : peers_.at(process).plans;
}

RankFacts PeerTable::FactsOf(int rank, int64_t plan, int64_t index) const {
  const bool exists = rank >= 0 && rank < roster_.num_ranks();
  const int process = exists ? roster_.ProcessOf(rank) : roster_.process();
  const Plans unknown;  // stands for a process without connection
  const Plans& plans = peers_.contains(process) ? PlansOf(process) : unknown;
  return {.process = process,
          .rank = roster_.RankName(rank),
          .rank_and_process = roster_.RankAndProcess(rank),
          .exchange = plans.Describe(plan, index),
          .plan = plans.Share(plan)};
}

std::string PeerTable::Where(int process) const {
  return StrCat("[", roster_.OwnName(), "] ", roster_.ProcessName(process), ": ");
}

std::vector<PeerCounts> PeerTable::Counts() const {
  std::vector<PeerCounts> counts;
  for (const auto& [process, peer] : peers_) {
    if (!peer.counts.transport.empty()) counts.push_back(peer.counts);
  }
  return counts;
}

}  // namespace jaxhet
