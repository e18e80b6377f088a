#ifndef XLA_PLUGIN_ENGINE_CONTROL_PEER_TABLE_H_
#define XLA_PLUGIN_ENGINE_CONTROL_PEER_TABLE_H_

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"
#include "xla_plugin/engine/common/exchange.h"
#include "xla_plugin/engine/common/messages.h"
#include "xla_plugin/engine/common/options.h"
#include "xla_plugin/engine/common/plans.h"
#include "xla_plugin/engine/common/wire.h"
#include "xla_plugin/net/socket/socket.h"
#include "xla_plugin/net/verbs/nics.h"
#include "xla_plugin/transport/process_vm/process_vm.h"
#include "xla_plugin/transport/transport.h"

namespace jaxhet {

struct RankInfo {
  int64_t device_id = 0;
  int process = 0;
  int island = 0;
  std::string vendor;
};

// Who is who in the job, and what to call them.
class Roster {
 public:
  Roster(int process, int num_processes) : process_(process), num_processes_(num_processes) {}

  int process() const { return process_; }
  int num_processes() const { return num_processes_; }
  int num_ranks() const { return static_cast<int>(ranks_.size()); }
  void Describe(int process, std::string_view description) { descriptions_[process] = description; }
  void SetRanks(std::vector<RankInfo> ranks) { ranks_ = std::move(ranks); }

  // Throws UsageError for a rank that does not exist (or before SetRanks).
  const RankInfo& Info(int rank) const {
    if (!std::cmp_less(rank, ranks_.size()) || rank < 0) {
      Throw(ErrorCode::kUsage, "the job has ", ranks_.size(), " ranks, but rank ", rank,
            " is asked for");
    }
    return ranks_[static_cast<size_t>(rank)];
  }
  int ProcessOf(int rank) const { return Info(rank).process; }
  bool IsRankOf(int rank, int process) const {
    return rank >= 0 && rank < num_ranks() && ProcessOf(rank) == process;
  }
  std::vector<int> RanksOf(int process) const {
    std::vector<int> ranks;
    for (int rank = 0; rank < num_ranks(); ++rank) {
      if (ProcessOf(rank) == process) ranks.push_back(rank);
    }
    return ranks;
  }

  // "rank 3/16 cpu1".
  std::string RankName(int rank) const {
    std::string name = StrCat("rank ", rank, "/", ranks_.size());
    if (rank < 0 || !std::cmp_less(rank, ranks_.size())) return name;
    const RankInfo& info = ranks_[static_cast<size_t>(rank)];
    return StrCat(name, " ", info.vendor, info.island);
  }
  // "rank 3 of process 1 (<description>), cpu1".
  std::string RankAndProcess(int rank) const {
    if (rank < 0 || !std::cmp_less(rank, ranks_.size())) return StrCat("rank ", rank);
    const RankInfo& info = ranks_[static_cast<size_t>(rank)];
    return StrCat("rank ", rank, " of ", ProcessName(info.process), ", ", info.vendor, info.island);
  }
  // "process 1 (<description>)".
  std::string ProcessName(int process) const {
    const auto found = descriptions_.find(process);
    const std::string name = StrCat("process ", process);
    return found == descriptions_.end() ? name : StrCat(name, " (", found->second, ")");
  }
  // "process 0/2".
  std::string OwnName() const { return StrCat("process ", process_, "/", num_processes_); }

 private:
  int process_;
  int num_processes_;
  std::map<int, std::string> descriptions_;  // by process
  std::vector<RankInfo> ranks_;
};

struct PeerSpec {
  int process = 0;
  std::string description;  // for people: host, pid
  Fd control;               // connected and authenticated, like the data sockets
  std::vector<Fd> data;
  bool same_host = false;
  // Allowed between processes; none: only control is connected.
  std::vector<std::string> transports;
  std::vector<std::string> device_transports;  // allowed between devices
  // Transports between processes that were refused, and why.
  std::map<std::string, std::string> refused;
  std::vector<SealKeys> keys;  // for `control` and each of `data`, if the job encrypts
};

class Peer;

// Receives the reports of the connections to peers.
class PeerEvents {
 public:
  virtual ~PeerEvents() = default;
  // Throws TransportError if this process and `peer` have no open transfer of this ticket.
  virtual Transfer& FindTransfer(const Peer& peer, uint64_t ticket) = 0;
  // Bytes of the transfer have moved.
  virtual void Moved(Peer& peer, Transfer& transfer) = 0;
  // The path to the peer works differently from now on.
  virtual void PathChanged(const Peer& peer, std::string_view what) = 0;
};

// Another process of the job, or this one, as the engine sees it.
class Peer final : public ConnectionHost {
 public:
  Peer(PeerEvents& events, int its_process, ControlChannel its_channel)
      : process(its_process),
        channel(std::move(its_channel)),
        counts({.process = its_process, .transport = {}, .refusals = {}}),
        events_(events) {}

  void Send(std::span<const iovec> message) override {
    channel.Send(MessageType::kTransport, message);
  }
  Transfer& Find(uint64_t ticket) override { return events_.FindTransfer(*this, ticket); }
  void Sent(Transfer& transfer, size_t num_bytes) override {
    transfer.sent += num_bytes;
    counts.bytes_sent += num_bytes;
    events_.Moved(*this, transfer);
  }
  void Received(Transfer& transfer, size_t num_bytes) override {
    if (!InBounds(transfer.received, num_bytes, transfer.receive.num_bytes())) {
      Throw(ErrorCode::kTransport, kBytesTwice);
    }
    transfer.received += num_bytes;
    counts.bytes_received += num_bytes;
    events_.Moved(*this, transfer);
  }
  void Log(std::string_view what) override {
    ++counts.path_failures;
    events_.PathChanged(*this, what);
  }
  void Lost(std::string_view why) override {
    if (lost.empty()) lost = why;
  }

  // Tells the peer why nothing follows.
  void SayFailure(const Error& error, int own_process) {
    const int failed_process = error.failed_process() >= 0 ? error.failed_process() : own_process;
    const FailInfo info{error.code(), failed_process};
    channel.Send(MessageType::kFail,
                 std::array{ObjectIovec(info), ToIovec(error.text().data(), error.text().size())});
    channel.FinishSending();
  }
  std::set<Pollable*> Pollables() {
    std::set<Pollable*> pollables;
    if (Pollable* const control = channel.socket()) pollables.insert(control);
    if (!connection) return pollables;
    for (Pollable* const pollable : connection->Pollables()) pollables.insert(pollable);
    return pollables;
  }

  const int process;
  bool same_host = true;
  std::vector<std::string> device_transports;  // allowed ones
  ControlChannel channel;
  PeerCounts counts;
  std::unique_ptr<Connection> connection;  // null: data moves between devices

  Plans plans;                   // plans that the peer has sent
  std::set<int64_t> plans_sent;  // to it
  struct LastStart {
    StartInfo info;
    Time time;
  };
  std::map<int, LastStart> last_starts;  // by rank
  Time last_heard;
  std::string lost;   // why the path to it is broken
  bool left = false;  // it has said goodbye

 private:
  PeerEvents& events_;
};

struct Introduction {
  Peer* peer;
  std::string error_prefix;                    // how an error about the peer begins
  std::vector<std::string> allowed;            // transports
  std::map<std::string, std::string> refused;  // refused transports, and why
  TransportSetup setup;
};

// Agrees with all peers, each over its control connection, on the transport to use: the first of
// the table that both ends can open and whose path both have proven. Blocks until `deadline`.
// Throws the Error that a peer reports, or DeadlineError, PeerError, TransportError naming the
// peer, and tells all peers before: one that sees the end of a connection must know the reason.
void Negotiate(int own_process, std::span<Introduction> introductions, Time deadline);

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
