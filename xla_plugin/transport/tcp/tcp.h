#ifndef XLA_PLUGIN_TRANSPORT_TCP_TCP_H_
#define XLA_PLUGIN_TRANSPORT_TCP_TCP_H_

#include <memory>

#include "xla_plugin/transport/transport.h"

namespace jaxhet {

// Over the data sockets: the sender cuts its bytes into chunks and gives each to the next socket
// that can take it; the receiver reads them right into their place.
std::unique_ptr<Connection> OpenTcp(const TransportSetup& setup, ConnectionHost& host);

}  // namespace jaxhet

#endif  // XLA_PLUGIN_TRANSPORT_TCP_TCP_H_
