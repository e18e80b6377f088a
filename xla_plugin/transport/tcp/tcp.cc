#include "xla_plugin/transport/tcp/tcp.h"

#include <algorithm>
#include <deque>
#include <utility>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"
#include "xla_plugin/transport/socket.h"

namespace jaxhet {
namespace {

constexpr uint32_t kChunkMagic = 0x3143'584a;  // "JXC1"

// Comes before the bytes [offset, offset + num_bytes) of the receiver's transfer `ticket`.
struct ChunkInfo {
  uint32_t magic;
  uint32_t reserved;
  uint64_t ticket;
  uint64_t offset;
  uint64_t num_bytes;
};

// One direction of a data socket: a header, of which `header_bytes` have passed, and after it the
// chunk, of which `moved` bytes have.
struct Flow {
  ChunkInfo header{};
  size_t header_bytes = 0;
  size_t moved = 0;

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
  DataSocket(Fd fd, SealKeys keys) : socket(std::move(fd), std::move(keys)) {}
  Socket socket;
  Flow in;
  Flow out;
  Transfer* sending = nullptr;  // the one of `out`; null: between two chunks
};

class TcpConnection final : public Connection {
 public:
  TcpConnection(std::vector<Fd> fds, std::vector<SealKeys> keys, size_t chunk_bytes,
                ConnectionHost& host)
      : host_(host), chunk_bytes_(chunk_bytes) {
    for (size_t i = 0; i < fds.size(); ++i) {
      data_.emplace_back(std::move(fds[i]), std::move(keys[i]));
    }
  }

  std::vector<Pollable*> Pollables() override {
    std::vector<Pollable*> sockets;
    for (DataSocket& data : data_) sockets.push_back(&data.socket);
    return sockets;
  }

  void Begin(Transfer& transfer, std::string_view /*announcement*/) override {
    const size_t num_bytes = transfer.send.num_bytes();
    if (transfer.sent < num_bytes) sends_.push_back({&transfer, transfer.sent});
  }

  void OnMessage(std::span<const std::byte> /*message*/) override {
    Throw(ErrorCode::kTransport, "a tcp connection has no messages of its own");
  }

  bool Advance() override {
    bool more = false;
    for (DataSocket& data : data_) {
      Receive(data);
      Send(data);
      more |= data.socket.readable();
      more |= data.socket.writable() && (data.sending != nullptr || !sends_.empty());
    }
    return more;
  }

 private:
  struct Outgoing {
    Transfer* transfer;
    size_t offset;  // of the next chunk
  };

  void NextChunk(DataSocket& data) {
    auto& [transfer, offset] = sends_.front();
    const size_t num_bytes = std::min(chunk_bytes_, transfer->send.num_bytes() - offset);
    data.out = {.header = {kChunkMagic, 0, transfer->peer_ticket, offset, num_bytes}};
    data.sending = transfer;
    offset += num_bytes;
    if (offset == transfer->send.num_bytes()) sends_.pop_front();
  }

  void Send(DataSocket& data) {
    data.socket.Flush();
    if (!data.socket.writable()) return;
    if (data.sending == nullptr) {
      if (sends_.empty()) return;
      NextChunk(data);
    }
    Flow& out = data.out;
    std::vector<iovec> pieces = out.Rest(data.sending->send);
    if (!out.HasHeader()) pieces.insert(pieces.begin(), out.HeaderRest());
    const size_t num_bytes = data.socket.Write(pieces);
    const size_t header_bytes = std::min(num_bytes, out.HeaderRest().iov_len);
    out.header_bytes += header_bytes;
    out.moved += num_bytes - header_bytes;
    if (out.moved < out.header.num_bytes) return;
    host_.Sent(*std::exchange(data.sending, nullptr), out.header.num_bytes);
  }

  void Receive(DataSocket& data) {
    Flow& in = data.in;
    if (!in.HasHeader()) {
      const iovec rest = in.HeaderRest();
      in.header_bytes += data.socket.Read({&rest, 1});
      if (in.HasHeader()) Claim(in.header);
    }
    if (in.HasHeader()) {
      Transfer& transfer = Target(in.header);
      const size_t num_bytes = data.socket.Read(in.Rest(transfer.receive));
      in.moved += num_bytes;
      if (in.moved == in.header.num_bytes) in = {};
      if (num_bytes > 0) host_.Received(transfer, num_bytes);
    }
    if (data.socket.closed()) host_.Lost(StrCat("a data connection: ", data.socket.close_reason()));
  }

  // Looked up for every read: a peer that sends bytes twice must not reach a finished transfer.
  Transfer& Target(const ChunkInfo& header) {
    if (header.magic != kChunkMagic) {
      Throw(ErrorCode::kTransport, "a chunk starts with ", header.magic, ", not with JXC1");
    }
    return host_.Find(header.ticket);
  }

  // Ranges are counted, not bytes: a chunk that is sent twice must not fill the place of another.
  void Claim(const ChunkInfo& header) {
    Transfer& transfer = Target(header);
    const size_t total = transfer.receive.num_bytes();
    if (header.num_bytes == 0 || !InBounds(header.offset, header.num_bytes, total)) {
      Throw(ErrorCode::kTransport, "a chunk of ", header.num_bytes, " bytes at ", header.offset,
            " lies outside of the transfer");
    }
    if (!transfer.claimed.Add(header.offset, header.num_bytes, total)) {
      Throw(ErrorCode::kTransport, kBytesTwice);
    }
  }

  ConnectionHost& host_;
  size_t chunk_bytes_;
  std::deque<DataSocket> data_;
  std::deque<Outgoing> sends_;
};

}  // namespace

std::unique_ptr<Connection> OpenTcp(const TransportSetup& setup, ConnectionHost& host) {
  if (setup.data_fds->empty()) Throw(ErrorCode::kTransport, "there are no data sockets");
  return std::make_unique<TcpConnection>(std::move(*setup.data_fds), std::move(*setup.data_keys),
                                         setup.chunk_bytes, host);
}

}  // namespace jaxhet
