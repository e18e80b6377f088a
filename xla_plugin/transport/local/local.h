#ifndef XLA_PLUGIN_TRANSPORT_LOCAL_LOCAL_H_
#define XLA_PLUGIN_TRANSPORT_LOCAL_LOCAL_H_

#include <memory>

#include "xla_plugin/transport/transport.h"

namespace jaxhet {

// Between the ranks of one process (a rank and itself included): plain memory copies.
std::unique_ptr<Connection> OpenLocal(ConnectionHost& host);

}  // namespace jaxhet

#endif  // XLA_PLUGIN_TRANSPORT_LOCAL_LOCAL_H_
