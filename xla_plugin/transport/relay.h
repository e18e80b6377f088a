#ifndef XLA_PLUGIN_TRANSPORT_RELAY_H_
#define XLA_PLUGIN_TRANSPORT_RELAY_H_

#include <memory>
#include <string>

namespace jaxhet {

// An HTTP proxy in this process, for the connections of JAX's distributed client to its service.
// When the service closes a connection, the client's end stays open until `Close`.
//
// JAX's client aborts the process as soon as its connection ends. Through the proxy it waits, and
// there is time to shut it down. A proxy, and not another address: the client compares the
// service's certificate with the address that it was given.
//
// The relay's threads need no interpreter, whose lock a program may hold for longer than the
// service waits for a heartbeat.
class Relay {
 public:
  // All connections lead to the service at `host` and `port`, whatever the client asks for.
  // Throws TransportError if no port can be opened.
  Relay(const std::string& host, const std::string& port);

  // Port of the proxy on this host's loopback interface.
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
