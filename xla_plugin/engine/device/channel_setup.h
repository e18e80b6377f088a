#ifndef XLA_PLUGIN_ENGINE_DEVICE_CHANNEL_SETUP_H_
#define XLA_PLUGIN_ENGINE_DEVICE_CHANNEL_SETUP_H_

#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "xla_plugin/engine/common/job_view.h"
#include "xla_plugin/engine/common/options.h"
#include "xla_plugin/engine/common/wire.h"
#include "xla_plugin/engine/device/device_rank.h"
#include "xla_plugin/net/verbs/nics.h"

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

// Connected and authenticated, for the two channels between these ranks, one lane after the other:
// one for its messages, and others for chunks, each over another path.
struct ChannelSockets {
  int rank;  // rank of this process
  int peer_rank;
  size_t num_lanes;
  std::vector<Fd> sockets;
  std::vector<SealKeys> keys;  // one for each socket, if the job encrypts
};

// A rank of this process and another one, with a channel there and one back.
struct ChannelPair {
  int rank;
  int peer_rank;

  bool operator==(const ChannelPair&) const = default;
};

struct ChannelOptions {
  const Options& engine;
  std::map<int, std::span<std::byte>> operands;  // by own rank, kProofBytes for every rank
                                                 // in the job; see ChannelSetup
  verbs::Nics* nics;                             // NICs of this process
};

// Takes memory for the channels that are opened after the start: those of `later`, of a job of
// `num_ranks`. Lets NICs reach it if `uses_nics` and there are some.
void MakeArenas(std::span<const std::unique_ptr<DeviceRank>> ranks,
                std::span<const ChannelPair> later, int num_ranks, bool uses_nics,
                const ChannelOptions& options);

// Agrees with the other processes on the channels of `pairs`: the target of each makes one of the
// first kind that it can, the source opens it and proves that it reaches the target's device, or
// else says why not, and the next kind is tried. `peers` has all ranks of the pairs. Blocks until
// `deadline`; the other processes must do the same. Throws DeadlineError, TransportError or
// PeerError naming the rank. Makes no driver call for pairs whose memory is in an arena.
void SetUpChannels(std::span<const ChannelPeer> peers,
                   std::span<const std::unique_ptr<DeviceRank>> ranks,
                   std::span<const ChannelPair> pairs, std::span<ChannelSockets> sockets,
                   const ChannelOptions& options, JobView& job, Time deadline);

}  // namespace jaxhet

#endif  // XLA_PLUGIN_ENGINE_DEVICE_CHANNEL_SETUP_H_
