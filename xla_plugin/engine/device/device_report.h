#ifndef XLA_PLUGIN_ENGINE_DEVICE_DEVICE_REPORT_H_
#define XLA_PLUGIN_ENGINE_DEVICE_DEVICE_REPORT_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "xla_plugin/engine/common/exchange.h"
#include "xla_plugin/transport/device_channel/device_channel.h"

// Facts about exchanges between devices. The engine's messages are made of them.
namespace jaxhet {

// The peer has launched something else where this rank launches `own`.
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

}  // namespace jaxhet

#endif  // XLA_PLUGIN_ENGINE_DEVICE_DEVICE_REPORT_H_
