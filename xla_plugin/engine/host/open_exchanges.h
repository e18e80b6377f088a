#ifndef XLA_PLUGIN_ENGINE_HOST_OPEN_EXCHANGES_H_
#define XLA_PLUGIN_ENGINE_HOST_OPEN_EXCHANGES_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "xla_plugin/base/error.h"
#include "xla_plugin/engine/common/exchange.h"
#include "xla_plugin/engine/common/flight_recorder.h"
#include "xla_plugin/engine/common/messages.h"
#include "xla_plugin/engine/common/options.h"
#include "xla_plugin/engine/control/peer_table.h"
#include "xla_plugin/engine/host/communicator_state.h"
#include "xla_plugin/engine/host/sibling_starts.h"

namespace jaxhet {

// The time of the engine's current call, and what the call leaves for the next one.
struct Agenda {
  Time now;
  Time next_timer;        // the engine must be called then, even without an event
  bool has_work = false;  // or at once
};

// An exchange that has ended.
struct Completion {
  int64_t id;
  DoneCallback done;
  std::shared_ptr<const Error> error;  // null: success
};

// The exchanges that this process's ranks have started and that have not ended, and the starts of
// peers that our ranks have not come to. Errors are thrown; who catches them fails the job, and
// drops the exchanges.
class OpenExchanges {
 public:
  // All arguments outlive it.
  OpenExchanges(PeerTable& peers, Agenda& agenda, const Options& options);

  void Start(ExchangeRequest request, int64_t id);
  void OnStart(Peer& peer, const StartInfo& info, std::string_view tail);
  // The ranks are known now: peers that are ahead may have started exchanges before.
  void CheckRanksOfStarts() const;
  // A peer has said goodbye: throws if an exchange waits for its start.
  void CheckLeft(const Peer& peer) const;
  // Throws for an exchange that is late, and puts the earliest deadline on the agenda.
  void CheckDeadlines();
  // Closes a transfer whose bytes have all moved, and completes its exchange if no other one is
  // open. Returns whether the transfer was closed.
  bool CloseIfDone(PeerTransfer& transfer);
  // End one exchange that can't start, or all open ones.
  void Refuse(ExchangeRequest request, int64_t id, std::shared_ptr<const Error> why);
  void Drop(const std::shared_ptr<const Error>& why);

  bool empty() const { return exchanges_.empty(); }
  bool HasLaggards() const { return !siblings_.AreEven(); }
  // Null if no transfer with the process is open.
  const PeerTransfer* With(int process) const;
  // Null if no open transfer has the ticket.
  PeerTransfer* Find(uint64_t ticket) const;
  // Begin of the text of an error about the process.
  std::string ContextOf(int process) const;
  // Begin of the text of an error about the exchange that started first; there must be one.
  std::string WhereFirst() const { return Where(exchanges_.begin()->second); }

  std::vector<Completion> TakeCompletions() { return std::exchange(completions_, {}); }
  const FlightRecorder& flight_recorder() const { return recorder_; }
  std::map<std::string, uint64_t> Stats() const;

 private:
  void StartOrThrow(Exchange& exchange);
  void Announce(PeerTransfer& transfer);
  void Meet(PeerTransfer& transfer, Peer& source, const StartInfo& info, std::string_view tail);
  void Release(Exchange& exchange);
  Time DeadlineOf(const PeerTransfer& transfer) const;

  void CheckStart(const StartInfo& info, int sender) const;
  void CheckRanks(const StartInfo& info, int sender) const;
  void CheckSameRun(const CommunicatorState& state, const StartInfo& info) const;
  void CheckOrder(const StartInfo& theirs) const;
  void CheckSameExchange(const PeerTransfer& transfer, const StartInfo& info) const;
  [[noreturn]] void ThrowOverlap(const Exchange& exchange) const;
  [[noreturn]] void ThrowLate(const Exchange& exchange) const;
  LatePeer LateFacts(const PeerTransfer& transfer) const;
  std::string Where(const Exchange& exchange) const;
  RankFacts OwnFacts(const ExchangeRequest& request) const {
    return peers_.FactsOf(request.rank, request.plan, request.index);
  }

  PeerTable& peers_;
  Agenda& agenda_;
  const Options& options_;

  std::map<std::pair<int, uint64_t>, CommunicatorState>
      communicators_;                        // by own rank, communicator
  std::map<int, OpenExecution> executions_;  // by own rank
  SiblingStarts siblings_;
  std::map<int64_t, Exchange> exchanges_;                  // by id
  std::unordered_map<uint64_t, PeerTransfer*> transfers_;  // open ones, by ticket
  uint64_t last_ticket_ = 0;
  std::vector<Completion> completions_;

  FlightRecorder recorder_;
  uint64_t started_ = 0;
  uint64_t completed_ = 0;
  Clock::duration in_flight_time_{};
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_ENGINE_HOST_OPEN_EXCHANGES_H_
