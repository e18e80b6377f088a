#ifndef XLA_PLUGIN_NET_SOCKET_PATH_NAME_H_
#define XLA_PLUGIN_NET_SOCKET_PATH_NAME_H_

#include <string>

namespace jaxhet::sockets {

// The way of a connected socket through the network, for people: "eth1 (10.0.1.1 to 10.0.1.2)".
// Sockets with equal names share their interfaces at both ends. Empty for sockets that are not of
// IPv4 or IPv6.
std::string PathName(int fd);

}  // namespace jaxhet::sockets

#endif  // XLA_PLUGIN_NET_SOCKET_PATH_NAME_H_
