#include "xla_plugin/net/socket/socket_connection.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <set>
#include <utility>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"
#include "xla_plugin/base/take.h"
#include "xla_plugin/net/socket/path.h"

namespace jaxhet::sockets {
namespace {

// Time for the message of a peer that ends: its data sockets may close before it arrives.
constexpr std::chrono::milliseconds kEndGrace{100};

// Data that the peer's kernel has not acknowledged for so long ends the connection (tcp(7)).
void LimitSilence(int socket, std::chrono::milliseconds timeout) {
  const auto timeout_ms = CheckedCast<unsigned>(timeout.count());
  if (setsockopt(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout_ms, sizeof timeout_ms) != 0) {
    ThrowErrno("setsockopt(TCP_USER_TIMEOUT)");
  }
}

void CheckIsChunk(const ChunkInfo& header) {
  if (header.magic == kChunkMagic) return;
  Throw(ErrorCode::kTransport, "a chunk starts with ", header.magic, ", not with JXC1");
}

}  // namespace

SocketConnection::SocketConnection(SocketSetup sockets, ConnectionHost& host)
    : host_(host), chunk_bytes_(sockets.chunk_bytes), path_timeout_(sockets.path_timeout) {
  if (sockets.data.empty()) Throw(ErrorCode::kTransport, "there are no data sockets");
  std::set<std::string> paths;
  if (sockets.control_fd >= 0) paths.insert(PathName(sockets.control_fd));
  for (size_t i = 0; i < sockets.data.size(); ++i) {
    std::string path = PathName(sockets.data[i].get());
    paths.insert(path);
    if (SetUpLongPath(sockets.data[i].get()) && chunk_bytes_ != kWholeTransfers) {
      chunk_bytes_ = std::min(chunk_bytes_, kLongPathChunkBytes);
    }
    data_.emplace_back(i, std::move(sockets.data[i]), std::move(sockets.keys[i]), std::move(path));
  }
  has_paths_ = paths.size() > 1;
}

std::string SocketConnection::Offer() {
  if (!has_paths_) return {};
  const OfferInfo info{kOfferMagic, static_cast<uint32_t>(data_.size())};
  return {reinterpret_cast<const char*>(&info), sizeof info};
}

void SocketConnection::Accept(std::string_view offer) {
  if (offer.empty() || !has_paths_) return;
  const auto info = Take<OfferInfo>(offer, "the peer's offer");
  if (info.magic != kOfferMagic || info.num_sockets != data_.size()) {
    Throw(ErrorCode::kTransport, "the peer's offer is not of this version of jaxhet");
  }
  confirms_ = true;
  for (const DataSocket& data : data_) LimitSilence(data.socket.fd(), path_timeout_);
}

std::vector<Pollable*> SocketConnection::Pollables() {
  std::vector<Pollable*> sockets;
  for (DataSocket& data : data_) sockets.push_back(&data.socket);
  return sockets;
}

void SocketConnection::Begin(Transfer& transfer, std::string_view /*announcement*/) {
  const size_t num_bytes = transfer.send.num_bytes();
  if (transfer.sent < num_bytes) sends_.push_back({&transfer, transfer.sent});
}

void SocketConnection::OnMessage(std::span<const std::byte> message) {
  std::string_view rest(reinterpret_cast<const char*>(message.data()), message.size());
  if (!confirms_) Throw(ErrorCode::kTransport, "a socket connection of one path has no messages");
  const auto info = Take<SocketEventInfo>(rest, "a message about a data socket");
  if (info.socket >= data_.size()) {
    Throw(ErrorCode::kTransport, "there is no data socket ", info.socket);
  }
  DataSocket& data = data_[info.socket];
  if (data.is_left_by_peer) Throw(ErrorCode::kTransport, "it had left that data socket before");
  OnConfirmed(data, info.num_chunks);
  if (info.event == SocketEvent::kLeft) return OnLeftByPeer(data, rest);
  if (info.event != SocketEvent::kReceived) {
    Throw(ErrorCode::kTransport, "nothing that happens to a data socket is called ",
          static_cast<uint32_t>(info.event));
  }
}

bool SocketConnection::Advance() {
  for (DataSocket& data : data_) {
    if (data.is_left) continue;
    Receive(data);
    Send(data);
    if (data.socket.closed()) OnClosed(data);
  }
  // Afterwards: a socket whose buffer has filled leaves the next chunk to one before it.
  return std::ranges::any_of(data_, [this](const DataSocket& data) {
    if (data.is_left) return false;
    return data.ended ||  // until kEndGrace is over
           data.socket.readable() ||
           (data.socket.writable() && (data.sending != nullptr || MayTake(data)));
  });
}

bool SocketConnection::HasBroken() const {
  return std::ranges::any_of(data_, [](const DataSocket& data) {
    return !data.is_left && data.socket.closed() &&
           (data.in.header_bytes > 0 || data.sending != nullptr);
  });
}

// Whether the next chunk is for this socket: for any that can take it, or where chunks are
// confirmed, for that with the fewest bytes under way. The kernel takes more than a slow path
// can send in the time that others need for all.
bool SocketConnection::MayTake(const DataSocket& data) const {
  if (resends_.empty() && sends_.empty()) return false;
  return !confirms_ || std::ranges::none_of(data_, [&](const DataSocket& other) {
    return !other.is_left && other.socket.writable() &&
           other.unconfirmed_bytes < data.unconfirmed_bytes;
  });
}

Chunk SocketConnection::TakeChunk() {
  if (!resends_.empty()) {
    const Chunk chunk = resends_.front();
    resends_.pop_front();
    return chunk;
  }
  auto& [transfer, offset] = sends_.front();
  const Chunk chunk{transfer, offset, std::min(chunk_bytes_, transfer->send.num_bytes() - offset)};
  offset += chunk.num_bytes;
  if (offset == transfer->send.num_bytes()) sends_.pop_front();
  return chunk;
}

void SocketConnection::NextChunk(DataSocket& data) {
  const Chunk chunk = TakeChunk();
  data.out = {
      .header = {kChunkMagic, 0, chunk.transfer->peer_ticket, chunk.offset, chunk.num_bytes}};
  data.sending = chunk.transfer;
  if (!confirms_) return;
  data.unconfirmed.push_back(chunk);
  data.unconfirmed_bytes += chunk.num_bytes;
}

void SocketConnection::Send(DataSocket& data) {
  data.socket.Flush();
  if (!data.socket.writable()) return;
  if (data.sending == nullptr) {
    if (!MayTake(data)) return;
    NextChunk(data);
  }
  Flow& out = data.out;
  std::vector<iovec> entries = out.Rest(data.sending->send);
  if (!out.HasHeader()) entries.insert(entries.begin(), out.HeaderRest());
  const size_t num_bytes = data.socket.Write(entries);
  const size_t header_bytes = std::min(num_bytes, out.HeaderRest().iov_len);
  out.header_bytes += header_bytes;
  out.moved += num_bytes - header_bytes;
  // Sealed bytes that the kernel has not taken would be lost if this process left the job.
  if (out.moved < out.header.num_bytes || !data.socket.is_flushed()) return;
  Transfer& transfer = *std::exchange(data.sending, nullptr);
  ++data.num_sent;
  if (!confirms_) host_.Sent(transfer, out.header.num_bytes);
}

void SocketConnection::Receive(DataSocket& data) {
  Flow& in = data.in;
  if (!in.HasHeader()) {
    const iovec rest = in.HeaderRest();
    in.header_bytes += data.socket.Read({&rest, 1});
  }
  if (!in.HasHeader()) return;
  CheckIsChunk(in.header);
  if (!in.is_reserved && !host_.IsReady(in.header.ticket)) return;
  // Looked up for every read: a peer that sends bytes twice must not reach a finished transfer.
  Transfer& transfer = host_.Find(in.header.ticket);
  if (!std::exchange(in.is_reserved, true)) {
    transfer.Reserve(in.header.offset, in.header.num_bytes);
  }
  const size_t num_bytes = data.socket.Read(in.Rest(transfer.receive));
  in.moved += num_bytes;
  const size_t chunk_bytes = in.header.num_bytes;
  const bool is_whole = in.moved == chunk_bytes;
  if (is_whole) in = {};
  if (!confirms_ && num_bytes > 0) host_.Received(transfer, num_bytes);
  if (!confirms_ || !is_whole) return;
  ++data.num_received;
  Say(data, SocketEvent::kReceived, {});
  host_.Received(transfer, chunk_bytes);
}

void SocketConnection::Say(const DataSocket& data, SocketEvent event, std::string_view reason) {
  const SocketEventInfo info{event, data.index, data.num_received};
  host_.Send(std::array{ObjectIovec(info), ToIovec(reason.data(), reason.size())});
}

void SocketConnection::OnConfirmed(DataSocket& data, uint64_t num_chunks) {
  if (num_chunks < data.num_confirmed || num_chunks > data.num_sent) {
    Throw(ErrorCode::kTransport, "it confirms ", num_chunks, " chunks of a data socket, but ",
          data.num_sent, " were sent");
  }
  for (; data.num_confirmed < num_chunks; ++data.num_confirmed) {
    const Chunk chunk = data.unconfirmed.front();
    data.unconfirmed.pop_front();
    data.unconfirmed_bytes -= chunk.num_bytes;
    host_.Sent(*chunk.transfer, chunk.num_bytes);
  }
}

void SocketConnection::OnClosed(DataSocket& data) {
  if (!confirms_) {
    const std::string over = data.path.empty() ? "" : " over " + data.path;
    return host_.Lost(StrCat("a data connection", over, ": ", data.socket.close_reason()));
  }
  const auto now = DataSocket::Clock::now();
  if (!data.ended) data.ended = now;
  if (now >= *data.ended + kEndGrace) LeavePath(data.path, data.socket.close_reason());
}

void SocketConnection::LeavePath(const std::string& path, std::string_view reason) {
  const auto is_open = [](const DataSocket& data) { return !data.is_left; };
  const auto others = std::ranges::count_if(
      data_, [&](const DataSocket& data) { return is_open(data) && data.path != path; });
  if (others > 0) {
    host_.Log(StrCat("socket leaves ", path, ": ", reason, ". What was under way there goes over ",
                     others,
                     " other data connections. Check that interface, its cable and switch"));
  }
  for (DataSocket& data : data_) {
    if (is_open(data) && data.path == path) Leave(data, reason);
  }
  if (others > 0) return;
  host_.Lost(StrCat("no data connection is left; the last was over ", path, ": ", reason,
                    ". Check the interfaces, cables and switches between both hosts, or name the "
                    "interfaces to use with JAXHET_SOCKET_INTERFACES"));
}

void SocketConnection::Leave(DataSocket& data, std::string_view reason) {
  if (data.in.is_reserved) {
    host_.Find(data.in.header.ticket).reserved.erase(data.in.header.offset);
  }
  data.in = {};
  data.sending = nullptr;
  data.is_left = true;
  shutdown(data.socket.fd(), SHUT_RDWR);
  Say(data, SocketEvent::kLeft, reason);
  SendAgain(data);
}

void SocketConnection::OnLeftByPeer(DataSocket& data, std::string_view reason) {
  data.is_left_by_peer = true;
  if (!data.is_left) LeavePath(data.path, StrCat("the peer: ", reason));
  SendAgain(data);
}

// Once neither end uses the socket any more.
void SocketConnection::SendAgain(DataSocket& data) {
  if (!data.is_left || !data.is_left_by_peer) return;
  resends_.insert(resends_.end(), data.unconfirmed.begin(), data.unconfirmed.end());
  data.unconfirmed.clear();
}

}  // namespace jaxhet::sockets
