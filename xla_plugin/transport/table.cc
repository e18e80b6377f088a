#include <array>
#include <utility>

#include "xla_plugin/net/verbs/verbs_connection.h"
#include "xla_plugin/transport/process_vm/process_vm.h"
#include "xla_plugin/transport/transport.h"

namespace jaxhet {

namespace {

std::unique_ptr<Connection> OpenSocket(TransportSetup& setup, ConnectionHost& host) {
  return sockets::OpenSockets(std::move(setup.sockets), host);
}

std::unique_ptr<Connection> OpenVerbs(TransportSetup& setup, ConnectionHost& host) {
  RefuseSealing(setup.encryption);
  return std::make_unique<verbs::VerbsConnection>(*setup.nics, setup.sockets.chunk_bytes, host);
}

}  // namespace

std::span<const Transport> Transports() {
  static constexpr std::array<Transport, 3> kTable = {{
      {"process_vm",
       [](TransportSetup& setup, ConnectionHost& host) { return OpenProcessVm(setup, host); }},
      {"verbs", &OpenVerbs},
      {"socket", &OpenSocket},
  }};
  return kTable;
}

}  // namespace jaxhet
