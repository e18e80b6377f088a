#ifndef XLA_PLUGIN_ENGINE_PROGRESS_ENGINE_H_
#define XLA_PLUGIN_ENGINE_PROGRESS_ENGINE_H_

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "xla_plugin/base/profiler_ranges.h"
#include "xla_plugin/engine/communicator_state.h"
#include "xla_plugin/engine/device_engine.h"
#include "xla_plugin/engine/exchange.h"
#include "xla_plugin/engine/flight_recorder.h"
#include "xla_plugin/engine/messages.h"
#include "xla_plugin/engine/negotiation.h"
#include "xla_plugin/engine/options.h"
#include "xla_plugin/engine/partition.h"
#include "xla_plugin/engine/peer.h"
#include "xla_plugin/engine/plans.h"
#include "xla_plugin/engine/roster.h"
#include "xla_plugin/transport/shared_memory.h"
#include "xla_plugin/transport/verbs/nics.h"

namespace jaxhet {

class ProgressEngine;

// A peer on its way into a running engine.
struct Newcomer {
  std::shared_ptr<ProgressEngine> engine;  // which the peer refers to
  std::map<int, Peer> peer;                // one, where Admit() finds it
  std::vector<Introduction> introduction;  // one

  // Blocks until `deadline`; throws as Negotiate() does. The peer learns why it failed.
  void Introduce(int own_process, Time deadline);
};

// The engine without its threads: starts, messages and time go in; messages, bytes and completions
// come out. It has no locks and never blocks (but for Connect), and all of it is called by one
// thread at a time. The first error of any part fails all of it, here and, by gossip, everywhere.
//
// An exchange between two ranks: each side sends kStart to the other when its program comes to it.
// Few bytes travel with it (eager). More begin to move when both starts have met, and end in the
// result's own memory. A process meets itself in the same way.
class ProgressEngine {
 public:
  ProgressEngine(int process, int num_processes, const Options& options);
  ~ProgressEngine();
  ProgressEngine(const ProgressEngine&) = delete;
  ProgressEngine& operator=(const ProgressEngine&) = delete;

  // Set-up, in this order.
  void AddPeer(PeerSpec spec);
  void Connect(Time deadline);
  std::set<Pollable*> Pollables();

  // A peer that joins a running engine: Invite() it, let it and us agree on a transport
  // (Newcomer::Introduce), which is done outside of the engine by any thread, and Admit() it.
  void Invite(PeerSpec spec, Newcomer& newcomer);
  // Returns what there is to poll.
  std::set<Pollable*> Admit(Newcomer& newcomer);

  // Commands. An Error inside fails the engine; none is thrown.
  void SetRanks(std::vector<RankInfo> ranks);
  void AddPlan(int64_t plan, std::string_view text, std::string_view program);
  // Sends a plan to all peers before any of its exchanges starts: for exchanges between devices.
  void PublishPlan(int64_t plan);
  // A message about a channel; it arrives in that process's TakeChannelMessages().
  void SendChannelMessage(int process, std::span<const iovec> body);
  struct ChannelMessage {
    int process;
    std::string body;
  };
  std::vector<ChannelMessage> TakeChannelMessages() { return std::exchange(channel_messages_, {}); }
  void Start(ExchangeRequest request, int64_t id);
  void Fail(const Error& error);
  // The path between devices to the rank broke; what its process has to say is read first.
  void Lose(int rank, std::string_view why) {
    PeerOf(rank).Lost(why);
    has_work_ = true;
  }
  // The exchanges between devices, which may wait for peers too; they outlive all calls.
  void SetDevices(const DeviceEngine* devices) { devices_ = devices; }
  // Tells the peers that no start follows. Exchanges that are under way fail, with the job.
  void SayGoodbye();

  // Meets the starts of this process's own ranks and sends what is kept. Cheap.
  void ServeOwn();
  // Handles everything that has come, moves a slice of bytes on each connection, looks at the time.
  void Pass();
  // Pass() can do more without an event.
  bool HasWork() const { return has_work_; }
  bool HasExchanges() const { return !exchanges_.empty(); }
  // When Pass() must be called even without an event.
  Time NextTimer() const { return failure_ ? Time::max() : next_timer_; }
  // All peers have closed their ends (or caused a failure): nothing is left to say.
  bool IsQuiet() const;

  struct Completion {
    int64_t id;
    DoneCallback done;
    std::shared_ptr<const Error> error;  // null: success
  };
  std::vector<Completion> TakeCompletions() { return std::exchange(completions_, {}); }
  // The first cause; null also after a goodbye in good order.
  std::shared_ptr<const Error> failure() const { return said_goodbye_ ? nullptr : failure_; }

  std::map<std::string, uint64_t> Stats() const;
  // One for each process, this one included.
  std::vector<PeerCounts> CountsOfPeers() const;
  const FlightRecorder& flight_recorder() const { return recorder_; }
  const Roster& roster() const { return roster_; }
  const Plans& plans() const { return plans_; }
  const Peer& peer(int process) const;
  const Peer& PeerOf(int rank) const { return peer(roster_.ProcessOf(rank)); }
  const Plans& PlansOf(int process) const;

  // Facts for errors about a rank's exchange.
  RankFacts FactsOf(int rank, int64_t plan, int64_t index) const;

 private:
  friend class Peer;

  template <typename Function>
  void Guarded(Function function);
  template <typename Function>
  void AttributeTo(Peer& peer, Function function);

  Introduction MakePeer(PeerSpec spec, std::map<int, Peer>& peers);
  void SayEnd(Peer& peer) const;
  static std::set<Pollable*> PollablesOf(Peer& peer);
  void StartOrThrow(Exchange& exchange);
  void Announce(PeerTransfer& transfer);
  void SendPlan(Peer& peer, int64_t plan);
  void OnMessage(Peer& peer, const Message& message);
  void OnStart(Peer& peer, const StartInfo& info, std::string_view tail);
  void OnGoodbye(Peer& peer);
  void AnswerGoodbye(Peer& peer);
  void Meet(PeerTransfer& transfer, Peer& source, const StartInfo& info, std::string_view tail);
  void CloseIfDone(PeerTransfer& transfer);
  void RecordStart(Exchange& exchange);
  void RecordEnd(const Exchange& exchange, FlightState state, Time now);
  void Release(Exchange& exchange);

  void ReadMessages(Peer& peer);
  void Discard();
  void SetFailedAndDrop();
  void CheckPeer(Peer& peer);
  bool WaitsInVain(const Peer& peer);
  void CheckTimers();
  Time DeadlineOf(const PeerTransfer& transfer) const;

  // Errors, and their facts.
  RankFacts OwnFacts(const ExchangeRequest& request) const;
  std::string Where(const Exchange& exchange) const;
  std::string Where(int process) const;
  std::optional<MovedBytes> Moved(int process) const;
  LatePeer LateFacts(const PeerTransfer& transfer) const;
  [[noreturn]] void ThrowLate(const Exchange& exchange) const;
  void CheckSameRun(const CommunicatorState& state, const StartInfo& info) const;
  void CheckOrder(const StartInfo& theirs) const;
  [[noreturn]] void ThrowOverlap(const Exchange& exchange) const;
  void CheckSameExchange(const PeerTransfer& transfer, const StartInfo& info) const;

  Peer& PeerOf(int rank);
  CommunicatorState& CommunicatorStateOf(const Exchange& exchange);
  const PeerTransfer* OpenTransferWith(int process) const;
  std::optional<DeviceWait> DeviceWaitFor(int process) const;
  bool WaitsFor(int process) const {
    return OpenTransferWith(process) != nullptr || DeviceWaitFor(process);
  }

  Options options_;
  const Encryption encryption_;
  const Severity least_severity_;
  Roster roster_;
  Plans plans_;
  SharedPage page_;
  verbs::Nics nics_;
  const DeviceEngine* devices_ = nullptr;
  std::map<int, Peer> peers_;                // by process, ourselves included
  std::vector<Introduction> introductions_;  // until Connect()

  std::map<std::pair<int, uint64_t>, CommunicatorState>
      communicators_;                                      // by own rank, communicator
  std::map<int, OpenExecution> executions_;                // by own rank
  std::map<int64_t, Exchange> exchanges_;                  // open ones, by id
  std::unordered_map<uint64_t, PeerTransfer*> transfers_;  // open ones, by ticket
  uint64_t last_ticket_ = 0;

  std::vector<Completion> completions_;
  std::vector<ChannelMessage> channel_messages_;
  std::shared_ptr<const Error> failure_;  // why nothing moves any more
  bool said_goodbye_ = false;
  static constexpr std::chrono::milliseconds kBusyPeriod{5};  // between polls of a peer that leaves
  bool heard_failure_ = false;                                // from a peer, which has logged it
  FlightRecorder recorder_;
  const std::optional<ProfilerRanges> ranges_;
  uint64_t started_ = 0;
  uint64_t completed_ = 0;
  Clock::duration in_flight_time_{};

  Time now_;  // time of the current call
  Time last_pass_;
  Time next_heartbeat_;
  Time next_timer_;  // the heartbeat or an earlier deadline
  bool has_work_ = false;
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_ENGINE_PROGRESS_ENGINE_H_
