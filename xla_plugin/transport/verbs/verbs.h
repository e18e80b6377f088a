#ifndef XLA_PLUGIN_TRANSPORT_VERBS_VERBS_H_
#define XLA_PLUGIN_TRANSPORT_VERBS_VERBS_H_

#include <memory>

#include "xla_plugin/transport/transport.h"

namespace jaxhet {

// Over InfiniBand or RoCE: the sender copies chunks into slots of its memory, its NIC writes them
// into the same slots of the receiver's, and the receiver copies them out and gives the slots back.
std::unique_ptr<Connection> OpenVerbs(const TransportSetup& setup, ConnectionHost& host);

}  // namespace jaxhet

#endif  // XLA_PLUGIN_TRANSPORT_VERBS_VERBS_H_
