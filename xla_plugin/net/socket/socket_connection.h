#ifndef XLA_PLUGIN_NET_SOCKET_SOCKET_CONNECTION_H_
#define XLA_PLUGIN_NET_SOCKET_SOCKET_CONNECTION_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "xla_plugin/net/connection.h"
#include "xla_plugin/net/socket/data_socket.h"

namespace jaxhet::sockets {

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
class SocketConnection final : public Connection {
 public:
  SocketConnection(SocketSetup sockets, ConnectionHost& host);

  std::string Offer() override;
  void Accept(std::string_view offer) override;
  std::vector<Pollable*> Pollables() override;
  void Begin(Transfer& transfer, std::string_view announcement) override;
  void OnMessage(std::span<const std::byte> message) override;
  bool Advance() override;

  bool HasMessages() const override { return confirms_; }
  bool HasBroken() const override;

 private:
  struct Outgoing {
    Transfer* transfer;
    size_t offset;  // offset of the next chunk
  };

  bool MayTake(const DataSocket& data) const;
  Chunk TakeChunk();
  void NextChunk(DataSocket& data);
  void Send(DataSocket& data);
  void Receive(DataSocket& data);
  void Say(const DataSocket& data, SocketEvent event, std::string_view reason);
  void OnConfirmed(DataSocket& data, uint64_t num_chunks);
  void OnClosed(DataSocket& data);
  void LeavePath(const std::string& path, std::string_view reason);
  void Leave(DataSocket& data, std::string_view reason);
  void OnLeftByPeer(DataSocket& data, std::string_view reason);
  void SendAgain(DataSocket& data);

  ConnectionHost& host_;
  size_t chunk_bytes_;
  std::chrono::milliseconds path_timeout_;
  std::deque<DataSocket> data_;
  std::deque<Outgoing> sends_;
  std::deque<Chunk> resends_;
  bool has_paths_ = false;  // several, the control connection's path included
  bool confirms_ = false;   // both ends have
};

}  // namespace jaxhet::sockets

#endif  // XLA_PLUGIN_NET_SOCKET_SOCKET_CONNECTION_H_
