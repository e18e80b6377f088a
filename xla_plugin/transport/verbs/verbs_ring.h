#ifndef XLA_PLUGIN_TRANSPORT_VERBS_VERBS_RING_H_
#define XLA_PLUGIN_TRANSPORT_VERBS_VERBS_RING_H_

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "xla_plugin/transport/ring/ring.h"

namespace jaxhet {

// verbs: any two devices with RDMA NICs. Each end has slots of its own that NICs reach, in its
// device's memory if that was proven, and in pinned host memory if not; a thread of each end tells
// the NICs what to move. The devices themselves see a ring like the others.
std::pair<std::unique_ptr<RingEnd>, std::string> MakeVerbsRing(const RingSetup& setup);
std::unique_ptr<RingEnd> OpenVerbsRing(const RingSetup& setup, std::string_view offer);

}  // namespace jaxhet

#endif  // XLA_PLUGIN_TRANSPORT_VERBS_VERBS_RING_H_
