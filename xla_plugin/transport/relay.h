#ifndef XLA_PLUGIN_TRANSPORT_RELAY_H_
#define XLA_PLUGIN_TRANSPORT_RELAY_H_

#include <memory>
#include <string>

namespace jaxhet {

// Passes bytes between a port of this host's loopback interface and a service. After the service
// has closed a connection, the client's side of it stays open and silent.
//
// JAX's distributed client aborts the process as soon as its connection to the service ends.
// Through a relay it waits instead, and there is time to shut it down.
//
// The relay's threads need no interpreter, whose lock a program may hold for longer than the
// service waits for a heartbeat.
class Relay {
 public:
  // Throws TransportError if no port can be opened.
  Relay(const std::string& host, const std::string& port);

  // The port to connect to.
  int port() const { return port_; }
  // Ends all connections. Without it they live as long as the process.
  void Close();

 private:
  class Sockets;

  std::shared_ptr<Sockets> sockets_;
  int port_ = 0;
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_TRANSPORT_RELAY_H_
