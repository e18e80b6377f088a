#ifndef XLA_PLUGIN_TRANSPORT_TRANSPORT_H_
#define XLA_PLUGIN_TRANSPORT_TRANSPORT_H_

#include <chrono>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "xla_plugin/base/fd.h"
#include "xla_plugin/net/connection.h"
#include "xla_plugin/net/seal.h"

namespace jaxhet {

struct MemoryState;
namespace verbs {
class Nics;
}

struct TransportSetup {
  bool same_host;
  size_t chunk_bytes;
  std::chrono::milliseconds path_timeout;  // without an acknowledgement, a network path has failed
  int control_fd;                          // the control connection's socket, or -1
  const MemoryState* memory_state;         // state of this process's memory
  verbs::Nics* nics;                       // NICs of this process
  std::vector<Fd> data_fds;                // the transport that uses them takes them
  std::vector<SealKeys> data_keys;         // one for each of `data_fds`
  Encryption encryption;
};

// A way to move bytes. `open` throws the reason if this end can't use it.
struct Transport {
  std::string_view name;
  std::unique_ptr<Connection> (*open)(TransportSetup& setup, ConnectionHost& host);
};

// A transport that a pair can't use.
struct Refusal {
  std::string transport;
  std::string reason;
  bool operator==(const Refusal&) const = default;
};

// All transports between processes, best first. The first that both ends accept is used.
std::span<const Transport> Transports();

}  // namespace jaxhet

#endif  // XLA_PLUGIN_TRANSPORT_TRANSPORT_H_
