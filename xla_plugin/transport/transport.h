#ifndef XLA_PLUGIN_TRANSPORT_TRANSPORT_H_
#define XLA_PLUGIN_TRANSPORT_TRANSPORT_H_

#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "xla_plugin/net/connection.h"
#include "xla_plugin/net/seal.h"
#include "xla_plugin/net/socket/socket_connection.h"

namespace jaxhet {

struct MemoryState;
namespace verbs {
class Nics;
}

struct TransportSetup {
  bool same_host;
  const MemoryState* memory_state;  // state of this process's memory
  verbs::Nics* nics;                // NICs of this process
  Encryption encryption;
  sockets::SocketSetup sockets;  // the transport that uses them takes them
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
