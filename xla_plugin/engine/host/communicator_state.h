#ifndef XLA_PLUGIN_ENGINE_HOST_COMMUNICATOR_STATE_H_
#define XLA_PLUGIN_ENGINE_HOST_COMMUNICATOR_STATE_H_

#include <compare>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <string_view>

#include "xla_plugin/engine/common/exchange.h"
#include "xla_plugin/engine/common/wire.h"

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

// The execution whose exchanges are open on one rank of ours, in any communicator. All of them
// belong to one execution: those of two could meet the wrong starts of peers.
class OpenExecution {
 public:
  // Exchanges of another execution than this one are open.
  bool Overlaps(int64_t run_id, int64_t plan) const {
    return num_open_ > 0 && (run_id != run_id_ || plan != plan_);
  }
  // An exchange starts. The caller has asked Overlaps().
  void Enter(int64_t run_id, int64_t plan) {
    run_id_ = run_id;
    plan_ = plan;
    ++num_open_;
  }
  // An exchange has completed.
  void Leave() { --num_open_; }

 private:
  int64_t run_id_ = 0;
  int64_t plan_ = 0;
  int64_t num_open_ = 0;
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

}  // namespace jaxhet

#endif  // XLA_PLUGIN_ENGINE_HOST_COMMUNICATOR_STATE_H_
