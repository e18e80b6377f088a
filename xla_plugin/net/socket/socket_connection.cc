#include "xla_plugin/net/socket/socket_connection.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <limits>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"
#include "xla_plugin/net/socket/socket.h"

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

constexpr uint32_t kLongUs = 5000;
constexpr int kMostUnsentBytes = 256 << 10;
constexpr std::string_view kByRate = "bbr";
// Bytes of a chunk over a long path: the slowest of several sockets holds back few bytes at the end
// of a transfer.
constexpr size_t kLongPathChunkBytes = size_t{64} << 10;

using GetName = int (*)(int, sockaddr*, socklen_t*);

struct Free {
  void operator()(ifaddrs* first) const { freeifaddrs(first); }
};

// An IPv4 or IPv6 address as text; empty for other families.
std::string TextOf(const sockaddr& address) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  const void* bytes = nullptr;
  if (address.sa_family == AF_INET) {
    bytes = &reinterpret_cast<const sockaddr_in&>(address).sin_addr;
  } else if (address.sa_family == AF_INET6) {
    bytes = &reinterpret_cast<const sockaddr_in6&>(address).sin6_addr;
  } else {
    return {};
  }
  return inet_ntop(address.sa_family, bytes, text.data(), text.size());
}

std::string AddressOf(int fd, GetName get_name) {
  sockaddr_storage storage{};
  socklen_t size = sizeof storage;
  auto& address = reinterpret_cast<sockaddr&>(storage);
  return get_name(fd, &address, &size) == 0 ? TextOf(address) : std::string();
}

// Name of the interface with this address, or empty.
std::string InterfaceOf(const std::string& address) {
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) return {};
  const std::unique_ptr<ifaddrs, Free> owner(first);
  for (const ifaddrs* entry = first; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr != nullptr && TextOf(*entry->ifa_addr) == address) return entry->ifa_name;
  }
  return {};
}

// The shortest round trip so far; 0 if it is unknown.
uint32_t RoundTripUs(int fd) {
  constexpr size_t kMinRtt = 148;  // tcpi_min_rtt in linux/tcp.h, which glibc's header lacks
  uint32_t found = 0;
  std::array<char, kMinRtt + sizeof found> info{};
  socklen_t size = info.size();
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, info.data(), &size) != 0) return 0;  // not of TCP
  std::memcpy(&found, &info[kMinRtt], sizeof found);
  return found == std::numeric_limits<uint32_t>::max() ? 0 : found;
}

// The way of a connected socket through the network, for people: "eth1 (10.0.1.1 to 10.0.1.2)".
// Sockets with equal names share their interfaces at both ends. Empty for sockets that are not of
// IPv4 or IPv6.
std::string PathName(int fd) {
  const std::string own = AddressOf(fd, &getsockname);
  const std::string peer = AddressOf(fd, &getpeername);
  if (own.empty() || peer.empty()) return {};
  const std::string interface = InterfaceOf(own);
  return StrCat(interface.empty() ? "an unknown interface" : interface, " (", own, " to ", peer,
                ")");
}

// Whether the round trip of a connected TCP socket is long, at least 5 ms. If so, sets it up:
// congestion control by rate (BBR, where the kernel has it), which takes no lost packet for
// congestion, and few unsent bytes in the kernel, so that a slow socket does not hold what others
// could send. Send and receive buffers are left to the kernel, which grows them.
bool SetUpLongPath(int fd) {
  if (RoundTripUs(fd) < kLongUs) return false;
  // Both may fail: the socket is slower then.
  setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, kByRate.data(), kByRate.size());
  setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &kMostUnsentBytes, sizeof kMostUnsentBytes);
  return true;
}

void CheckIsChunk(const ChunkInfo& header) {
  if (header.magic == kChunkMagic) return;
  Throw(ErrorCode::kTransport, "a chunk starts with ", header.magic, ", not with JXC1");
}

// Bytes [offset, offset + num_bytes) of what a transfer sends.
struct Chunk {
  Transfer* transfer;
  size_t offset;
  size_t num_bytes;
};

// One direction of a data socket, which moves a header and then a chunk: the numbers of bytes of
// both that have moved.
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

class SocketConnection final : public Connection {
 public:
  SocketConnection(SocketSetup sockets, ConnectionHost& host)
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
      data_.emplace_back(i, std::move(sockets.data[i]), std::move(sockets.keys[i]),
                         std::move(path));
    }
    has_paths_ = paths.size() > 1;
  }

  std::string Offer() override {
    if (!has_paths_) return {};
    const OfferInfo info{kOfferMagic, static_cast<uint32_t>(data_.size())};
    return {reinterpret_cast<const char*>(&info), sizeof info};
  }

  void Accept(std::string_view offer) override {
    if (offer.empty() || !has_paths_) return;
    const auto info = Take<OfferInfo>(offer, "the peer's offer");
    if (info.magic != kOfferMagic || info.num_sockets != data_.size()) {
      Throw(ErrorCode::kTransport, "the peer's offer is not of this version of jaxhet");
    }
    confirms_ = true;
    for (const DataSocket& data : data_) LimitSilence(data.socket.fd(), path_timeout_);
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

  void OnMessage(std::span<const std::byte> message) override {
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

  bool Advance() override {
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

  bool HasMessages() const override { return confirms_; }
  bool HasBroken() const override {
    return std::ranges::any_of(data_, [](const DataSocket& data) {
      return !data.is_left && data.socket.closed() &&
             (data.in.header_bytes > 0 || data.sending != nullptr);
    });
  }

 private:
  struct Outgoing {
    Transfer* transfer;
    size_t offset;  // offset of the next chunk
  };

  // Whether the next chunk is for this socket: for any that can take it, or where chunks are
  // confirmed, for that with the fewest bytes under way. The kernel takes more than a slow path
  // can send in the time that others need for all.
  bool MayTake(const DataSocket& data) const {
    if (resends_.empty() && sends_.empty()) return false;
    return !confirms_ || std::ranges::none_of(data_, [&](const DataSocket& other) {
      return !other.is_left && other.socket.writable() &&
             other.unconfirmed_bytes < data.unconfirmed_bytes;
    });
  }

  Chunk TakeChunk() {
    if (!resends_.empty()) {
      const Chunk chunk = resends_.front();
      resends_.pop_front();
      return chunk;
    }
    auto& [transfer, offset] = sends_.front();
    const Chunk chunk{transfer, offset,
                      std::min(chunk_bytes_, transfer->send.num_bytes() - offset)};
    offset += chunk.num_bytes;
    if (offset == transfer->send.num_bytes()) sends_.pop_front();
    return chunk;
  }

  void NextChunk(DataSocket& data) {
    const Chunk chunk = TakeChunk();
    data.out = {
        .header = {kChunkMagic, 0, chunk.transfer->peer_ticket, chunk.offset, chunk.num_bytes}};
    data.sending = chunk.transfer;
    if (!confirms_) return;
    data.unconfirmed.push_back(chunk);
    data.unconfirmed_bytes += chunk.num_bytes;
  }

  void Send(DataSocket& data) {
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

  void Receive(DataSocket& data) {
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

  void Say(const DataSocket& data, SocketEvent event, std::string_view reason) {
    const SocketEventInfo info{event, data.index, data.num_received};
    host_.Send(std::array{ObjectIovec(info), ToIovec(reason.data(), reason.size())});
  }

  void OnConfirmed(DataSocket& data, uint64_t num_chunks) {
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

  void OnClosed(DataSocket& data) {
    if (!confirms_) {
      const std::string over = data.path.empty() ? "" : " over " + data.path;
      return host_.Lost(StrCat("a data connection", over, ": ", data.socket.close_reason()));
    }
    const auto now = DataSocket::Clock::now();
    if (!data.ended) data.ended = now;
    if (now >= *data.ended + kEndGrace) LeavePath(data.path, data.socket.close_reason());
  }

  void LeavePath(const std::string& path, std::string_view reason) {
    const auto is_open = [](const DataSocket& data) { return !data.is_left; };
    const auto others = std::ranges::count_if(
        data_, [&](const DataSocket& data) { return is_open(data) && data.path != path; });
    if (others > 0) {
      host_.Log(StrCat("socket leaves ", path, ": ", reason,
                       ". What was under way there goes over ", others,
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

  void Leave(DataSocket& data, std::string_view reason) {
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

  void OnLeftByPeer(DataSocket& data, std::string_view reason) {
    data.is_left_by_peer = true;
    if (!data.is_left) LeavePath(data.path, StrCat("the peer: ", reason));
    SendAgain(data);
  }

  // Once neither end uses the socket any more.
  void SendAgain(DataSocket& data) {
    if (!data.is_left || !data.is_left_by_peer) return;
    resends_.insert(resends_.end(), data.unconfirmed.begin(), data.unconfirmed.end());
    data.unconfirmed.clear();
  }

  ConnectionHost& host_;
  size_t chunk_bytes_;
  std::chrono::milliseconds path_timeout_;
  std::deque<DataSocket> data_;
  std::deque<Outgoing> sends_;
  std::deque<Chunk> resends_;
  bool has_paths_ = false;  // several, the control connection's path included
  bool confirms_ = false;   // both ends have
};

}  // namespace

std::unique_ptr<Connection> OpenSockets(SocketSetup setup, ConnectionHost& host) {
  return std::make_unique<SocketConnection>(std::move(setup), host);
}

}  // namespace jaxhet::sockets
