#ifndef XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_SOCKETS_H_
#define XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_SOCKETS_H_

#include <cstddef>

#include "xla_plugin/base/fd.h"

namespace jaxhet {

// Another descriptor of the socket, which blocks from now on.
Fd BlockingCopy(const Fd& socket);
// All bytes, with these flags of send(2). Throws TransportError with errno.
void SendAll(const Fd& socket, const void* from, size_t num_bytes, int flags);

}  // namespace jaxhet

#endif  // XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_SOCKETS_H_
