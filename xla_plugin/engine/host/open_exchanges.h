#ifndef XLA_PLUGIN_ENGINE_HOST_OPEN_EXCHANGES_H_
#define XLA_PLUGIN_ENGINE_HOST_OPEN_EXCHANGES_H_

#include <compare>
#include <cstdint>
#include <deque>
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
#include "xla_plugin/engine/common/wire.h"
#include "xla_plugin/engine/control/peer_table.h"

namespace jaxhet {

// Fields that the starts of two ranks must share to meet, seen from one of them.
struct MeetingKey {
  int64_t run;
  int64_t index;
  int64_t sequence;
  int peer_rank;
  auto operator<=>(const MeetingKey&) const = default;
};

// A start of a peer that our rank has not come to yet.
struct Arrival {
  StartInfo info;
  int process;       // the sender
  std::string tail;  // the eager bytes or the announcement of the transport
};

// One rank of ours in one communicator: counts its runs, and brings its starts together with those
// of the other members.
class CommunicatorState {
 public:
  struct Position {
    int64_t run;
    int64_t sequence;
  };

  // The rank starts exchange `index` of `plan` in the execution `run_id`. Executions follow each
  // other; throws UsageError if one continues after another has begun. Run ids have no order: XLA
  // counts them up for every executable from a start of its own.
  Position Enter(int64_t run_id, int64_t plan, int64_t index);

  int64_t run() const { return run_; }
  int64_t plan() const { return plan_; }
  // Id of the current run; equal for all ranks of the process that take part in it.
  int64_t run_id() const { return run_ids_.back(); }

  std::map<MeetingKey, PeerTransfer*> waiting;  // ours that wait for the peer's start
  std::map<MeetingKey, Arrival> arrived;        // theirs that wait for ours
  // When a peer's first start of a plan arrived.
  std::map<std::pair<int, int64_t>, Time> announced;

 private:
  static constexpr size_t kRememberedRuns = 16;

  int64_t run_ = 0;
  std::deque<int64_t> run_ids_;  // the last runs; the current one is at the back
  int64_t plan_ = 0;
  std::map<int64_t, int64_t> sequences_;  // the current run's, by index
};

// Exchanges that some ranks of this process have started and others have not. Peers wait for the
// others, which are still in the execution, even if the program ends after it has read the first
// ranks' results.
class SiblingStarts {
 public:
  void Add(const ExchangeRequest& request);
  bool AreEven() const { return uneven_.empty(); }
  void Clear() { uneven_.clear(); }

 private:
  struct Entry {
    int64_t run_id;
    int64_t plan;
    int64_t index;
    std::map<int, int64_t> counts;  // by rank

    bool IsOf(const ExchangeRequest& request) const {
      return run_id == request.run_id && plan == request.plan;
    }
    bool IsEven() const;
  };

  // The rank of the request has come to a new execution, so it has ended those before. What it did
  // not start there, it skipped in a branch of its own.
  void Leave(const ExchangeRequest& request);
  // Forgets the oldest execution. All ranks have ended it, since XLA lets no device be so many
  // executions behind; a rank that did not start its exchanges skipped them in a branch of its own.
  void ForgetOldest();

  std::vector<Entry> uneven_;  // in the order of the first starts
};

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
  void CheckOverlap(const ExchangeRequest& started) const;
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
      communicators_;  // by own rank, communicator
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
