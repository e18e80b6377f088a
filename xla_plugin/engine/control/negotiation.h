#ifndef XLA_PLUGIN_ENGINE_CONTROL_NEGOTIATION_H_
#define XLA_PLUGIN_ENGINE_CONTROL_NEGOTIATION_H_

#include <chrono>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "xla_plugin/base/error.h"
#include "xla_plugin/engine/control/peer.h"

namespace jaxhet {

struct Introduction {
  Peer* peer;
  std::string error_prefix;                    // how an error about the peer begins
  std::vector<std::string> allowed;            // transports
  std::map<std::string, std::string> refused;  // refused transports, and why
  TransportSetup setup;
};

// Agrees with all peers, each over its control connection, on the transport to use: the first of
// the table that both ends can open and whose path both have proven. Blocks until `deadline`.
// Throws the Error that a peer reports, or DeadlineError, PeerError, TransportError naming the
// peer, and tells all peers before: one that sees the end of a connection must know the reason.
void Negotiate(int own_process, std::span<Introduction> introductions, Time deadline);

}  // namespace jaxhet

#endif  // XLA_PLUGIN_ENGINE_CONTROL_NEGOTIATION_H_
