#ifndef XLA_PLUGIN_ENGINE_RING_SETUP_H_
#define XLA_PLUGIN_ENGINE_RING_SETUP_H_

#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "xla_plugin/engine/core.h"
#include "xla_plugin/engine/device_rank.h"

namespace jaxhet {

// A rank of the job, as the set-up of rings needs to know it.
struct RingPeer {
  int rank;
  int process;
  std::string name;    // "rank 3 of process 1 (...), cuda1"
  std::string vendor;  // the platform
  bool same_process;
  bool same_host;
  std::vector<std::string> allowed;  // transports
};

// Connected and authenticated, for the two rings between these ranks: one for the messages of each,
// and the others for chunks.
struct RingSockets {
  static constexpr size_t kNumMessageSockets = 2;

  int rank;  // rank of this process
  int peer_rank;
  std::vector<Fd> sockets;
  std::vector<SealKeys> keys;  // one for each socket, if the job encrypts
};

struct RingOptions {
  size_t slot_bytes;
  size_t pull_bytes;
  std::map<int, std::span<std::byte>> operands;  // by own rank, kProofBytes for every rank
                                                 // in the job; see RingSetup
  verbs::Options verbs;
  Encryption encryption = Encryption::kOff;
  Severity least_severity = Severity::kInfo;
};

// How the messages of the set-up travel; they arrive in order.
struct RingMail {
  std::function<void(int process, std::span<const iovec> body)> send;
  std::function<std::vector<Core::RingMessage>()>
      receive;                  // messages that have arrived; does not block
  std::function<void()> check;  // throws if the job has failed
};

// Agrees with all processes on a ring from each rank of the job to each of `ranks`, and back: the
// target makes one of the first kind that it can, the source opens it and proves that it reaches
// the target's device, or else says why not, and the next kind is tried. Blocks until `deadline`;
// all processes must be here. Throws DeadlineError or TransportError naming the rank.
void SetUpRings(std::span<const RingPeer> peers, std::span<const std::unique_ptr<DeviceRank>> ranks,
                std::span<RingSockets> sockets, const RingOptions& options, const RingMail& mail,
                Time deadline);

}  // namespace jaxhet

#endif  // XLA_PLUGIN_ENGINE_RING_SETUP_H_
