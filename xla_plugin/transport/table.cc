#include <array>

#include "xla_plugin/transport/shm/shm_pull.h"
#include "xla_plugin/transport/shm/shm_ring.h"
#include "xla_plugin/transport/tcp/tcp.h"
#include "xla_plugin/transport/transport.h"
#include "xla_plugin/transport/verbs/verbs.h"

namespace jaxhet {

std::span<const Transport> Transports() {
  static constexpr std::array<Transport, 4> kTable = {{
      {"shm", &OpenShmPull},
      {"shm_ring", &OpenShmRing},
      {"verbs", &OpenVerbs},
      {"tcp", &OpenTcp},
  }};
  return kTable;
}

}  // namespace jaxhet
