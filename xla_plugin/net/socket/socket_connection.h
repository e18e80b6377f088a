#ifndef XLA_PLUGIN_NET_SOCKET_SOCKET_CONNECTION_H_
#define XLA_PLUGIN_NET_SOCKET_SOCKET_CONNECTION_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "xla_plugin/base/fd.h"
#include "xla_plugin/net/connection.h"
#include "xla_plugin/net/seal.h"

namespace jaxhet::sockets {

inline constexpr uint32_t kChunkMagic = 0x3143'584a;  // "JXC1"
inline constexpr uint32_t kOfferMagic = 0x3150'584a;  // "JXP1"

// Precedes the bytes [offset, offset + num_bytes) of the receiver's transfer `ticket`.
struct ChunkInfo {
  uint32_t magic;
  uint32_t reserved;
  uint64_t ticket;
  uint64_t offset;
  uint64_t num_bytes;
};

// The offer of an end whose sockets have several paths. One with a single path offers nothing.
struct OfferInfo {
  uint32_t magic;
  uint32_t num_sockets;
};

enum class SocketEvent : uint32_t {
  kReceived,  // all of `num_chunks` chunks of this socket are in place
  kLeft,      // `num_chunks` chunks are in place; no more are read; the reason follows
};

// State of the sender's end of a data socket. It travels over the control connection.
struct SocketEventInfo {
  SocketEvent event;
  uint32_t socket;
  uint64_t num_chunks;  // since the start
};

inline constexpr size_t kWholeTransfers = SIZE_MAX;  // chunk_bytes that cut nothing

struct SocketSetup {
  int control_fd;  // socket of the control connection, or -1
  std::vector<Fd> data;
  std::vector<SealKeys> keys;  // one for each of `data`
  size_t chunk_bytes;
  std::chrono::milliseconds path_timeout;  // without an acknowledgement, a network path has failed
};

// The sender cuts its bytes into chunks and gives each to the next socket that can take it; the
// receiver reads them right into their place.
//
// Where all data use the path of the control connection, a chunk counts as sent once the kernel has
// it, and the end of a socket is the end of the connection. The kernel may send on after this
// process has left the job: silence has no limit there, and heartbeats find a dead peer.
//
// With other paths, the receiver confirms whole chunks over the control connection. When a socket
// ends, or its data stay unacknowledged for too long, this end leaves all sockets of its path,
// reads no more of them, and says how many chunks of each it has; so does the peer then. Each sends
// the chunks that the other end does not have again, over the sockets of other paths: none arrives
// twice.
std::unique_ptr<Connection> OpenSockets(SocketSetup setup, ConnectionHost& host);

}  // namespace jaxhet::sockets

#endif  // XLA_PLUGIN_NET_SOCKET_SOCKET_CONNECTION_H_
