#ifndef XLA_PLUGIN_ENGINE_CONTROL_PEER_TABLE_H_
#define XLA_PLUGIN_ENGINE_CONTROL_PEER_TABLE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "xla_plugin/base/error.h"
#include "xla_plugin/engine/common/messages.h"
#include "xla_plugin/engine/common/options.h"
#include "xla_plugin/engine/common/plans.h"
#include "xla_plugin/engine/control/negotiation.h"
#include "xla_plugin/engine/control/peer.h"
#include "xla_plugin/engine/control/roster.h"
#include "xla_plugin/net/verbs/nics.h"
#include "xla_plugin/transport/process_vm/process_vm.h"

namespace jaxhet {

// The processes that this one is connected with, itself included: who they are, what they have
// planned, and the facts that errors need of them.
class PeerTable {
 public:
  // `options` and `events` outlive it.
  PeerTable(int process, int num_processes, const Options& options, PeerEvents& events);

  // A peer is made in `peers`, and merged when it is introduced.
  Introduction Make(PeerSpec spec, std::map<int, Peer>& peers);
  void Merge(std::map<int, Peer>& peers);  // keeps their addresses

  // Peers that read this process's memory see that it has failed, or left.
  void SetFailed() { memory_state_.SetFailed(); }

  void SetRanks(std::vector<RankInfo> ranks) { roster_.SetRanks(std::move(ranks)); }
  // A plan of this process.
  void AddPlan(int64_t plan, std::string_view text, std::string_view program);
  // Sends the peer a plan of this process, if it was not sent.
  void SendPlan(Peer& peer, int64_t plan) const;

  const Roster& roster() const { return roster_; }
  // By process.
  std::map<int, Peer>& all() { return peers_; }
  const std::map<int, Peer>& all() const { return peers_; }
  // Throws UsageError if it is not connected.
  const Peer& Of(int process) const;
  Peer& OfRank(int rank);
  const Peer& OfRank(int rank) const { return Of(roster_.ProcessOf(rank)); }
  Peer& self() { return peers_.at(roster_.process()); }
  const Plans& plans() const { return plans_; }
  const Plans& PlansOf(int process) const;

  // Facts for errors about a rank's exchange. A rank that does not exist is taken for one of this
  // process.
  RankFacts FactsOf(int rank, int64_t plan, int64_t index) const;
  // "[process 0/2] process 1 (<description>): ".
  std::string Where(int process) const;

  // One for each process, this one included.
  std::vector<PeerCounts> Counts() const;

 private:
  const Options& options_;
  PeerEvents& events_;
  const Encryption encryption_;
  Roster roster_;
  Plans plans_;  // this process's own
  MemoryState memory_state_;
  verbs::Nics nics_;
  std::map<int, Peer> peers_;  // by process
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_ENGINE_CONTROL_PEER_TABLE_H_
