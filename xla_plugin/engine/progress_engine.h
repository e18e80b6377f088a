#ifndef XLA_PLUGIN_ENGINE_PROGRESS_ENGINE_H_
#define XLA_PLUGIN_ENGINE_PROGRESS_ENGINE_H_

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "xla_plugin/engine/common/exchange.h"
#include "xla_plugin/engine/common/flight_recorder.h"
#include "xla_plugin/engine/common/messages.h"
#include "xla_plugin/engine/common/options.h"
#include "xla_plugin/engine/control/peer_table.h"
#include "xla_plugin/engine/device/device_engine.h"
#include "xla_plugin/engine/host/open_exchanges.h"

namespace jaxhet {

class ProgressEngine;

// Peers on their way into an engine.
struct Newcomers {
  std::shared_ptr<ProgressEngine> engine;  // which the peers refer to
  std::map<int, Peer> peers;               // until Admit()
  std::vector<Introduction> introductions;
};

// The engine without its threads. It takes starts, messages and the time, and gives messages, bytes
// and completions. It has no locks and does not block: one thread at a time calls its functions.
// The first error of any part fails the whole engine, which tells all peers, so that they
// fail as well.
//
// An exchange between two ranks: each side sends kStart to the other when its program comes to it.
// Few bytes travel with it (eager). More begin to move when both starts have met, and end in the
// result's own memory. A process meets itself in the same way.
class ProgressEngine : private PeerEvents {
 public:
  ProgressEngine(int process, int num_processes, const Options& options);
  ~ProgressEngine() override = default;
  ProgressEngine(const ProgressEngine&) = delete;
  ProgressEngine& operator=(const ProgressEngine&) = delete;

  // Peers join in three steps: Invite() each, Negotiate() with all, which any thread may do outside
  // of the engine, and Admit() them.
  void Invite(PeerSpec spec, Newcomers& newcomers);
  // The peers may be silent until then. Returns the objects to poll.
  std::set<Pollable*> Admit(Newcomers& newcomers, Time silent_until = {});

  // Commands. An Error inside fails the engine; none is thrown.
  void SetRanks(std::vector<RankInfo> ranks);
  void AddPlan(int64_t plan, std::string_view text, std::string_view program) {
    peers_.AddPlan(plan, text, program);
  }
  // Sends a plan to all peers before any of its exchanges starts: for exchanges between devices.
  // Peers that join later get it from Admit().
  void PublishPlan(int64_t plan);
  // A message about a channel; it arrives in that process's TakeChannelMessages().
  void SendChannelMessage(int process, std::string_view body);
  std::vector<ChannelMessage> TakeChannelMessages(
      const std::function<bool(const ChannelMessage&)>& want);
  void Start(ExchangeRequest request, int64_t id);
  void Fail(const Error& error);
  // The path between devices to the rank broke. The error is what its process says, if it does.
  void Lose(int rank, std::string_view why);
  // The exchanges between devices, which may wait for peers too; they outlive all calls.
  void SetDevices(const DeviceEngine* devices) { devices_ = devices; }
  // Tells the peers that no start follows. Exchanges that are under way fail, with the job.
  void SayGoodbye();

  // Brings together starts of this process's own ranks, and sends what is kept. Cheap.
  void ServeOwn();
  // Handles everything that has come, moves a slice of bytes on each connection, looks at the time.
  void Pass();
  // Whether Pass() can do more without an event.
  bool HasWork() const { return agenda_.has_work; }
  bool HasExchanges() const { return !exchanges_.empty(); }
  // Whether a rank of this process has yet to come to an exchange that another one has started.
  bool HasLaggards() const { return exchanges_.HasLaggards(); }
  // When Pass() must be called even without an event.
  Time NextTimer() const { return failure_ ? Time::max() : agenda_.next_timer; }
  // Whether all peers have closed their ends or caused the failure: nothing is left to say.
  bool IsQuiet() const;

  std::vector<Completion> TakeCompletions() { return exchanges_.TakeCompletions(); }
  // The first cause of the failure; null also after goodbyes without one.
  std::shared_ptr<const Error> failure() const { return said_goodbye_ ? nullptr : failure_; }

  std::map<std::string, uint64_t> Stats() const;
  const FlightRecorder& flight_recorder() const { return exchanges_.flight_recorder(); }
  const PeerTable& peers() const { return peers_; }

 private:
  Transfer& FindTransfer(const Peer& peer, uint64_t ticket) override;
  void Moved(Peer& peer, Transfer& transfer) override;
  void PathChanged(const Peer& peer, std::string_view what) override;

  template <typename Function>
  void Guarded(Function function);
  template <typename Function>
  void Attributed(const Peer& peer, Function function);

  void ReadMessages(Peer& peer);
  void OnMessage(Peer& peer, const Message& message);
  void Discard();
  void CheckTimers();
  void End(std::shared_ptr<const Error> why);
  void SayEnd(Peer& peer) const;

  // How peers leave.
  void AnswerGoodbye(Peer& peer);
  void CheckPeer(Peer& peer);
  bool WaitsInVain(const Peer& peer);
  std::optional<DeviceWait> DeviceWaitFor(int process) const;
  bool WaitsFor(int process) const {
    return exchanges_.With(process) != nullptr || DeviceWaitFor(process);
  }
  std::string ContextOf(int process) const;

  const Options options_;
  const Severity least_severity_;
  Agenda agenda_;
  PeerTable peers_;
  OpenExchanges exchanges_;
  const DeviceEngine* devices_ = nullptr;

  std::vector<ChannelMessage> channel_messages_;
  std::shared_ptr<const Error> failure_;  // why nothing moves any more
  bool said_goodbye_ = false;
  bool heard_failure_ = false;  // from a peer, which has logged it
  Time last_pass_;
  Time next_heartbeat_;
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_ENGINE_PROGRESS_ENGINE_H_
