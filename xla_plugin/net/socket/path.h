#ifndef XLA_PLUGIN_NET_SOCKET_PATH_H_
#define XLA_PLUGIN_NET_SOCKET_PATH_H_

#include <cstddef>
#include <string>

namespace jaxhet::sockets {

// The way of a connected socket through the network, for people: "eth1 (10.0.1.1 to 10.0.1.2)".
// Sockets with equal names share their interfaces at both ends. Empty for sockets that are not of
// IPv4 or IPv6.
std::string PathName(int fd);

// Bytes of a chunk over a long path: the slowest of several sockets holds back few bytes at the end
// of a transfer.
inline constexpr size_t kLongPathChunkBytes = size_t{64} << 10;

// Whether the round trip of a connected TCP socket is long, at least 5 ms. If so, sets it up:
// congestion control by rate (BBR, where the kernel has it), which takes no lost packet for
// congestion, and few unsent bytes in the kernel, so that a slow socket does not hold what others
// could send. Send and receive buffers are left to the kernel, which grows them.
bool SetUpLongPath(int fd);

}  // namespace jaxhet::sockets

#endif  // XLA_PLUGIN_NET_SOCKET_PATH_H_
