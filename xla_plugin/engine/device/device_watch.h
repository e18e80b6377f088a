#ifndef XLA_PLUGIN_ENGINE_DEVICE_DEVICE_WATCH_H_
#define XLA_PLUGIN_ENGINE_DEVICE_DEVICE_WATCH_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "xla_plugin/device/device.h"
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
  // When the device has reached it and no earlier one waits for a peer; Time::max() until then: the
  // data of later ones may have come to a channel that is not read yet.
  Time since;
};

// A rank's exchanges as any thread sees them, and their end when the job has failed. Only Abandon()
// makes driver calls.
//
// After a failure, the program's stream is held at the next Done(). Exchanges then end one after
// the other, in the order of their Done(): all streams run to the exchange's end, its result is
// poisoned if it has not arrived, and the program continues to the next Done(). No stream may be
// left waiting: a driver that allocates memory waits for all streams.
class DeviceWatch {
 public:
  DeviceWatch(int rank, Device& device, const RankChannels& channels,
              const DeviceWords<RankWords>& words, const StreamProgress& sent,
              const StreamProgress& received, InFlightTransfers& transfers)
      : rank_(rank),
        device_(device),
        stream_(device.CreateStream(StreamPriority::kHigh)),
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

  // The job has failed: lets nothing start any more, and stops the program's stream at the next
  // Done() that it comes to. Any thread calls it, for all ranks before the first Abandon().
  void Stop();
  bool stopped() const { return stopped_; }
  // Ends what is in flight; again for what a thread has started meanwhile. False if the device did
  // not get there in time; the program stays where it is then, until the next call goes on. One
  // thread at a time.
  bool Abandon(std::chrono::milliseconds timeout);

  struct Counts {
    uint64_t completed;
    Clock::duration in_flight_time;  // sum over the completed ones
  };
  Counts counts() const;
  std::deque<FlightRecord> FlightRecords() const;

 private:
  struct Failed {
    InFlight transfer;
    uint32_t turn;                 // number of the Done() that the program must not pass
    std::span<std::byte> missing;  // part of the result that has not arrived
    bool is_filled = false;        // the poison is on its stream
  };

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

  // Whether the program has reached the exchange's start.
  bool IsReached(const InFlight& transfer) const;
  void RecordReached();
  void RecordCompleted();
  FlightRecord RecordOf(const InFlight& transfer, Time started) const;
  std::optional<BrokenChannel> FindBroken() const;
  std::optional<LaunchMismatch> FindMismatch(const InFlight& transfer) const;
  std::optional<LateTransfer> FindLate(const InFlight& transfer,
                                       std::chrono::milliseconds wait_budget,
                                       std::chrono::milliseconds first_wait_budget) const;

  bool FailAll();
  bool OpenUntil(Time limit, const std::function<bool()>& is_over);
  bool RunToTheEnd(const InFlight& transfer, Time limit);
  bool Poison(Failed& failed, Time limit);

  const int rank_;
  Device& device_;
  const Stream stream_;  // for poison
  const RankChannels& channels_;
  const DeviceWords<RankWords>& words_;
  const StreamProgress& sent_;
  const StreamProgress& received_;
  std::atomic<bool> stopped_ = false;
  // Members of Abandon():
  std::deque<Failed> remaining_;  // not ended
  std::vector<Marks> sends_;      // ended, perhaps except on the done stream
  Time copied_;                   // when targets have finished copies that were under way
  InFlightTransfers& transfers_;  // whose mutex guards the members below
  uint64_t completed_ = 0;
  Clock::duration in_flight_time_{};
  uint32_t waiting_ = 0;  // number of the first transfer that waits for a peer
  Time waiting_since_;
  FlightRecorder recorder_;
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_ENGINE_DEVICE_DEVICE_WATCH_H_
