#ifndef XLA_PLUGIN_TRANSPORT_RING_TCP_RING_H_
#define XLA_PLUGIN_TRANSPORT_RING_TCP_RING_H_

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "xla_plugin/transport/ring/ring.h"

namespace jaxhet {

// tcp: any two devices. Each end has slots and words of its own, in host memory; threads, one for
// each socket, carry filled slots from the source's to the target's. To its device each end is a
// ring like the others.
std::pair<std::unique_ptr<RingEnd>, std::string> MakeTcpRing(const RingSetup& setup);
std::unique_ptr<RingEnd> OpenTcpRing(const RingSetup& setup, std::string_view offer);

}  // namespace jaxhet

#endif  // XLA_PLUGIN_TRANSPORT_RING_TCP_RING_H_
