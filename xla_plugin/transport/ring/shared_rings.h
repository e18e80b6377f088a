#ifndef XLA_PLUGIN_TRANSPORT_RING_SHARED_RINGS_H_
#define XLA_PLUGIN_TRANSPORT_RING_SHARED_RINGS_H_

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "xla_plugin/transport/ring/ring.h"

// Rings within one host; see RingTransport.
namespace jaxhet {

using MadeRing = std::pair<std::unique_ptr<RingEnd>, std::string>;

// local: two devices of one process; the slots are the target device's memory.
MadeRing MakeLocalRing(const RingSetup& setup);
std::unique_ptr<RingEnd> OpenLocalRing(const RingSetup& setup, std::string_view offer);

// cuda_ipc, hip_ipc: devices of one vendor in two processes; the slots are the target device's
// memory, mapped into the source's process.
MadeRing MakeCudaIpcRing(const RingSetup& setup);
MadeRing MakeHipIpcRing(const RingSetup& setup);
std::unique_ptr<RingEnd> OpenIpcRing(const RingSetup& setup, std::string_view offer);

// shm: any two devices; the slots are host memory that both see.
MadeRing MakeShmRing(const RingSetup& setup);
std::unique_ptr<RingEnd> OpenShmRingEnd(const RingSetup& setup, std::string_view offer);

}  // namespace jaxhet

#endif  // XLA_PLUGIN_TRANSPORT_RING_SHARED_RINGS_H_
