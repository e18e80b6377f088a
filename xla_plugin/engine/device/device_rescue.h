#ifndef XLA_PLUGIN_ENGINE_DEVICE_DEVICE_RESCUE_H_
#define XLA_PLUGIN_ENGINE_DEVICE_DEVICE_RESCUE_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <deque>
#include <functional>
#include <span>
#include <vector>

#include "xla_plugin/device/device.h"
#include "xla_plugin/engine/device/device_watch.h"
#include "xla_plugin/engine/device/in_flight.h"
#include "xla_plugin/engine/device/rank_channels.h"

namespace jaxhet {

// The end of a rank's exchanges when the job has failed.
//
// The program's stream is held at the next Done(). Exchanges then end one after the other, in the
// order of their Done(): all streams run to the exchange's end, its result is poisoned if it has
// not arrived, and the program continues to the next Done(). No stream may be left waiting: a
// driver that allocates memory waits for all streams.
class DeviceRescue {
 public:
  DeviceRescue(Device& device, const RankChannels& channels, const DeviceWords<RankWords>& words,
               const StreamProgress& sent, const StreamProgress& received, DeviceWatch& watch)
      : device_(device),
        channels_(channels),
        words_(words),
        sent_(sent),
        received_(received),
        watch_(watch),
        stream_(device.CreateStream(StreamPriority::kHigh)) {}

  // Lets nothing start any more, and stops the program's stream at the next Done() that it comes
  // to. Any thread calls it, for all ranks before the first Abandon().
  void Stop();
  bool stopped() const { return stopped_; }
  // Ends what is in flight; again for what a thread has started meanwhile. False if the device did
  // not get there in time; the program stays where it is then, until the next call goes on.
  bool Abandon(std::chrono::milliseconds timeout);

 private:
  bool OpenUntil(Time limit, const std::function<bool()>& is_over);
  bool RunToTheEnd(const InFlight& transfer, Time limit);

  struct Remaining {
    DeviceWatch::Failed failed;
    bool is_filled = false;  // the poison is on its stream
  };
  bool Poison(Remaining& remaining, Time limit);

  Device& device_;
  const RankChannels& channels_;
  const DeviceWords<RankWords>& words_;
  const StreamProgress& sent_;
  const StreamProgress& received_;
  DeviceWatch& watch_;
  Stream stream_;                    // for poison
  std::deque<Remaining> remaining_;  // not ended
  std::vector<Marks> sends_;         // ended, perhaps except on the done stream
  Time copied_;                      // when targets have finished copies that were under way
  std::atomic<bool> stopped_ = false;
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_ENGINE_DEVICE_DEVICE_RESCUE_H_
