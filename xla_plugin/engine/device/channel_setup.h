#ifndef XLA_PLUGIN_ENGINE_DEVICE_CHANNEL_SETUP_H_
#define XLA_PLUGIN_ENGINE_DEVICE_CHANNEL_SETUP_H_

#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "xla_plugin/engine/common/job_view.h"
#include "xla_plugin/engine/common/wire.h"
#include "xla_plugin/engine/device/device_rank.h"
#include "xla_plugin/net/verbs/options.h"
#include "xla_plugin/transport/device_channel/lane.h"

namespace jaxhet {

// A rank of the job, as the set-up of channels needs to know it.
struct ChannelPeer {
  int rank;
  int process;
  std::string name;    // "rank 3 of process 1 (...), cuda1"
  std::string vendor;  // the platform
  bool same_process;
  bool same_host;
  std::vector<std::string> allowed;  // transports
};

// Connected and authenticated, for the two channels between these ranks: one for the messages of
// each, one for those of each lane, and the others for chunks.
struct ChannelSockets {
  static constexpr size_t kNumMessageSockets = 2 + Lane::kMost;

  int rank;  // rank of this process
  int peer_rank;
  std::vector<Fd> sockets;
  std::vector<SealKeys> keys;  // one for each socket, if the job encrypts
};

struct ChannelOptions {
  size_t slot_bytes;
  size_t pull_bytes;
  std::map<int, std::span<std::byte>> operands;  // by own rank, kProofBytes for every rank
                                                 // in the job; see ChannelSetup
  verbs::Options verbs;
  Encryption encryption = Encryption::kOff;
  Severity least_severity = Severity::kInfo;
  std::chrono::milliseconds path_timeout;  // see TransportSetup
};

// How the messages of the set-up travel; they arrive in order.
struct ChannelMail {
  std::function<void(int process, std::span<const iovec> body)> send;
  std::function<std::vector<ChannelMessage>()>
      receive;                  // messages that have arrived; does not block
  std::function<void()> check;  // throws if the job has failed
};

// Agrees with all processes on a channel from each rank of the job to each of `ranks`, and back:
// the target makes one of the first kind that it can, the source opens it and proves that it
// reaches the target's device, or else says why not, and the next kind is tried. Blocks until
// `deadline`; all processes must be here. Throws DeadlineError or TransportError naming the rank.
void SetUpChannels(std::span<const ChannelPeer> peers,
                   std::span<const std::unique_ptr<DeviceRank>> ranks,
                   std::span<ChannelSockets> sockets, const ChannelOptions& options,
                   const ChannelMail& mail, Time deadline);

}  // namespace jaxhet

#endif  // XLA_PLUGIN_ENGINE_DEVICE_CHANNEL_SETUP_H_
