#ifndef XLA_PLUGIN_ENGINE_DEVICE_DEVICE_WATCH_H_
#define XLA_PLUGIN_ENGINE_DEVICE_DEVICE_WATCH_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <span>
#include <string>

#include "xla_plugin/engine/common/flight_recorder.h"
#include "xla_plugin/engine/device/in_flight.h"
#include "xla_plugin/engine/device/rank_channels.h"

namespace jaxhet {

// A peer launched another exchange in the place of this rank's launch `own`.
struct LaunchMismatch {
  int peer_rank;
  Launch own;
  Launch theirs;
};

// An exchange that waits for longer than its deadline.
struct LateTransfer {
  int64_t plan;
  int64_t index;
  int peer_rank;
  bool has_launched;           // the peer, this exchange
  std::optional<Launch> last;  // the peer's latest one, if not
  std::chrono::milliseconds waited;
};

// A channel to or from that rank.
struct BrokenChannel {
  int peer_rank;
  std::string why;
};

// State of the exchanges in flight.
struct WatchReport {
  size_t in_flight = 0;
  std::optional<LateTransfer> late;
  std::optional<LaunchMismatch> mismatch;  // where the peer's launch arrived in a message
  std::optional<BrokenChannel> broken;
};

// An exchange in flight that waits for the peer.
struct DeviceWait {
  int rank;
  int peer_rank;
  int64_t plan;
  int64_t index;
  Time since;  // reached by the device; Time::max() if it has not been
};

// A rank's exchanges as any thread sees them. Makes no driver call.
class DeviceWatch {
 public:
  DeviceWatch(int rank, const RankChannels& channels, const DeviceWords<RankWords>& words,
              const StreamProgress& sent, const StreamProgress& received,
              InFlightTransfers& transfers)
      : rank_(rank),
        channels_(channels),
        words_(words),
        sent_(sent),
        received_(received),
        transfers_(transfers) {}

  // Records what has started and ended. `wait_budget` holds for a peer that runs the same plan,
  // `first_wait_budget` until then.
  WatchReport Look(std::chrono::milliseconds wait_budget,
                   std::chrono::milliseconds first_wait_budget);
  // Whether all sent bytes are in their targets' slots or on the way there, so that a target can
  // receive them after this process has exited. Targets that have exited don't count.
  bool IsDrained(const std::function<bool(int target)>& is_gone) const;
  // The oldest with one of `peer_ranks`.
  std::optional<DeviceWait> OldestWait(std::span<const int> peer_ranks) const;

  // The job has failed: Look() records no more.
  void Stop() { stopped_ = true; }
  // Removes all transfers and records them as failed, in the order in which the program waits for
  // them; those without a Done() are last.
  struct Failed {
    InFlight transfer;
    uint32_t turn;                 // number of the Done() that the program must not pass
    std::span<std::byte> missing;  // part of the result that has not arrived
  };
  std::deque<Failed> FailAll();
  // Whether the program has reached the exchange's start.
  bool IsReached(const InFlight& transfer) const;

  struct Counts {
    uint64_t completed;
    Clock::duration in_flight_time;  // sum over the completed ones
  };
  Counts counts() const;
  std::deque<FlightRecord> FlightRecords() const;

 private:
  // The state of a transfer, from the words that devices write. The transfers' mutex is held, or it
  // is a copy.
  bool IsReceived(const InFlight& transfer) const {
    return !transfer.is_pending && received_.IsOver(transfer.receive.marks);
  }
  bool IsSent(const InFlight& transfer) const {
    const bool is_untaken = transfer.send.route.is_zero_copy() && !transfer.is_done();
    return !is_untaken && sent_.IsOver(transfer.send.marks);
  }
  bool IsComplete(const InFlight& transfer) const {
    return IsReceived(transfer) && IsSent(transfer);
  }
  // Whether the data is in its slots, or farther.
  bool HasArrived(const InFlight& transfer) const;
  // Whether the target has taken the data.
  bool HasLeft(const InFlight& transfer) const;
  std::span<std::byte> MissingOf(const InFlight& transfer) const;

  void RecordReached();
  void RecordCompleted();
  FlightRecord RecordOf(const InFlight& transfer, Time started) const;
  std::optional<BrokenChannel> FindBroken() const;
  std::optional<LaunchMismatch> FindMismatch(const InFlight& transfer) const;
  std::optional<LateTransfer> FindLate(const InFlight& transfer,
                                       std::chrono::milliseconds wait_budget,
                                       std::chrono::milliseconds first_wait_budget) const;

  const int rank_;
  const RankChannels& channels_;
  const DeviceWords<RankWords>& words_;
  const StreamProgress& sent_;
  const StreamProgress& received_;
  std::atomic<bool> stopped_ = false;
  InFlightTransfers& transfers_;  // whose mutex guards the members below
  uint64_t completed_ = 0;
  Clock::duration in_flight_time_{};
  uint32_t waiting_ = 0;  // number of the first transfer that waits for a peer
  Time waiting_since_;
  FlightRecorder recorder_;
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_ENGINE_DEVICE_DEVICE_WATCH_H_
