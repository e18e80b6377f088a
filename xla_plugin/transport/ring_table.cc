#include <array>

#include "xla_plugin/transport/ring/shared_rings.h"
#include "xla_plugin/transport/ring/tcp_ring.h"
#include "xla_plugin/transport/verbs/verbs_ring.h"

namespace jaxhet {
namespace {

constexpr std::array kTransports = {
    RingTransport{.name = "local", .make = MakeLocalRing, .open = OpenLocalRing},
    RingTransport{.name = "cuda_ipc", .make = MakeCudaIpcRing, .open = OpenIpcRing},
    RingTransport{.name = "hip_ipc", .make = MakeHipIpcRing, .open = OpenIpcRing},
    RingTransport{.name = "shm", .make = MakeShmRing, .open = OpenShmRingEnd},
    RingTransport{.name = "verbs", .make = MakeVerbsRing, .open = OpenVerbsRing},
    RingTransport{.name = "tcp", .make = MakeTcpRing, .open = OpenTcpRing},
};

}  // namespace

std::span<const RingTransport> RingTransports() { return kTransports; }

}  // namespace jaxhet
