#ifndef XLA_PLUGIN_NET_SOCKET_DATA_SOCKET_H_
#define XLA_PLUGIN_NET_SOCKET_DATA_SOCKET_H_

#include <chrono>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "xla_plugin/base/io_list.h"
#include "xla_plugin/net/connection.h"
#include "xla_plugin/net/socket/socket.h"

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
  kLeft,      // so many are, and nothing else of it is read; the reason follows
};

// State of the sender's end of a data socket. It travels over the control connection.
struct SocketEventInfo {
  SocketEvent event;
  uint32_t socket;
  uint64_t num_chunks;  // since the start
};

// Bytes [offset, offset + num_bytes) of what a transfer sends.
struct Chunk {
  Transfer* transfer;
  size_t offset;
  size_t num_bytes;
};

// One direction of a data socket: a header, of which `header_bytes` have passed, and after it the
// chunk, of which `moved` bytes have.
struct Flow {
  ChunkInfo header{};
  size_t header_bytes = 0;
  size_t moved = 0;
  bool is_reserved = false;  // in the receiver's transfer

  bool HasHeader() const { return header_bytes == sizeof header; }
  iovec HeaderRest() {
    return ToIovec(reinterpret_cast<std::byte*>(&header) + header_bytes,
                   sizeof header - header_bytes);
  }
  std::vector<iovec> Rest(const IoList& list) const {
    return list.Cut(header.offset + moved, header.num_bytes - moved);
  }
};

struct DataSocket {
  using Clock = std::chrono::steady_clock;

  DataSocket(size_t its_index, Fd fd, SealKeys keys, std::string its_path)
      : index(static_cast<uint32_t>(its_index)),
        socket(std::move(fd), std::move(keys)),
        path(std::move(its_path)) {}

  uint32_t index;
  Socket socket;
  std::string path;  // see PathName
  Flow in;
  Flow out;
  Transfer* sending = nullptr;  // the one of `out`; null: between two chunks

  // Where chunks are confirmed:
  std::deque<Chunk> unconfirmed;  // oldest first, the one of `out` included
  size_t unconfirmed_bytes = 0;   // sum over `unconfirmed`
  uint64_t num_sent = 0;          // whole chunks
  uint64_t num_confirmed = 0;
  uint64_t num_received = 0;
  bool is_left = false;  // this end reads and writes nothing any more
  bool is_left_by_peer = false;
  std::optional<Clock::time_point> ended;  // when the socket was found closed
};

}  // namespace jaxhet::sockets

#endif  // XLA_PLUGIN_NET_SOCKET_DATA_SOCKET_H_
