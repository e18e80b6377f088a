#ifndef XLA_PLUGIN_TRANSPORT_SHM_SHM_RING_H_
#define XLA_PLUGIN_TRANSPORT_SHM_SHM_RING_H_

#include <memory>

#include "xla_plugin/transport/transport.h"

namespace jaxhet {

// Between processes of one host: the sender copies chunks into slots of its shared memory, the
// receiver copies them out and gives the slots back, both at the same time.
std::unique_ptr<Connection> OpenShmRing(const TransportSetup& setup, ConnectionHost& host);

}  // namespace jaxhet

#endif  // XLA_PLUGIN_TRANSPORT_SHM_SHM_RING_H_
