#include "xla_plugin/transport/process_vm/process_vm.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <deque>
#include <utility>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"
#include "xla_plugin/base/fd.h"

namespace jaxhet {
namespace {

struct SegmentInfo {
  uint64_t address;
  uint64_t num_bytes;
};

IoList ParseSegments(std::string_view text, size_t num_bytes) {
  IoList source;
  for (; text.size() >= sizeof(SegmentInfo); text.remove_prefix(sizeof(SegmentInfo))) {
    SegmentInfo segment{};
    std::memcpy(&segment, text.data(), sizeof segment);
    if (!InBounds(source.num_bytes(), segment.num_bytes, num_bytes)) break;
    source.Add(reinterpret_cast<const void*>(segment.address), segment.num_bytes);
  }
  if (!text.empty() || source.num_bytes() != num_bytes) {
    Throw(ErrorCode::kTransport, "the announced segments do not add up to ", num_bytes, " bytes");
  }
  return source;
}

// MemoryState as a peer reads it.
struct StateInfo {
  std::array<uint64_t, 2> nonce;
  uint64_t failed;
};
static_assert(sizeof(StateInfo) == sizeof(MemoryState));

struct PullOfferInfo {
  int64_t pid;
  std::array<uint64_t, 2> nonce;
  uint64_t state_address;
};

// A connection whose receiver copies straight out of the sender's memory. A start announces where
// the sender's bytes lie; the receiver pulls them and answers with the sender's ticket, which frees
// them. Between ranks of one process there is nothing to agree on or to check.
class PullConnection final : public Connection {
 public:
  // `own` is this process's state, null between ranks of one process.
  PullConnection(const MemoryState* own, ConnectionHost& host) : own_(own), host_(host) {}

  std::string Offer() override {
    const PullOfferInfo offer{getpid(), own_->nonce, reinterpret_cast<uint64_t>(own_)};
    return {reinterpret_cast<const char*>(&offer), sizeof offer};
  }

  void Accept(std::string_view text) override {
    if (text.size() != sizeof peer_) Throw(ErrorCode::kTransport, "the peer's offer is cut");
    std::memcpy(&peer_, text.data(), sizeof peer_);
    pidfd_.Reset(static_cast<int>(syscall(SYS_pidfd_open, pid(), 0)));
    if (!pidfd_) ThrowErrno("pidfd_open");
    StateInfo state{};
    if (!ReadState(state)) ThrowErrno("process_vm_readv");
    if (state.nonce != peer_.nonce) {
      Throw(ErrorCode::kTransport, "process_vm_readv reads another process than the peer");
    }
  }

  std::string Announce(const Transfer& transfer) override {
    std::string text;
    for (const iovec& entry : transfer.send.entries()) {
      const SegmentInfo segment{reinterpret_cast<uint64_t>(entry.iov_base), entry.iov_len};
      text.append(reinterpret_cast<const char*>(&segment), sizeof segment);
    }
    return text;
  }

  void Begin(Transfer& transfer, std::string_view announcement) override {
    if (transfer.received == transfer.receive.num_bytes()) return;
    pulls_.push_back({&transfer, ParseSegments(announcement, transfer.receive.num_bytes())});
  }

  bool Advance() override {
    if (pulls_.empty()) return false;
    auto& [transfer_pointer, source] = pulls_.front();
    Transfer& transfer = *transfer_pointer;
    const size_t slice = std::min(kSliceBytes, source.num_bytes() - transfer.received);
    const size_t num_bytes =
        Copy(transfer.receive.Cut(transfer.received, slice), source.Cut(transfer.received, slice));
    if (num_bytes == 0) return false;
    if (transfer.received + num_bytes == source.num_bytes()) {
      if (!SourceIsAlive()) return false;
      pulls_.pop_front();
      const iovec ticket = ObjectIovec(transfer.peer_ticket);
      host_.Send({&ticket, 1});
    }
    host_.Received(transfer, num_bytes);
    return !pulls_.empty();
  }

  void OnMessage(std::span<const std::byte> message) override {
    uint64_t ticket = 0;
    if (message.size() != sizeof ticket) Throw(ErrorCode::kTransport, "a pull's receipt is cut");
    std::memcpy(&ticket, message.data(), sizeof ticket);
    Transfer& transfer = host_.Find(ticket);
    host_.Sent(transfer, transfer.send.num_bytes() - transfer.sent);
  }

 private:
  struct Pull {
    Transfer* transfer;
    IoList source;  // in the peer's address space
  };

  pid_t pid() const { return static_cast<pid_t>(peer_.pid); }

  bool ReadState(StateInfo& state) const {
    const iovec to = ObjectIovec(state);
    const iovec from = ToIovec(reinterpret_cast<const void*>(peer_.state_address), sizeof state);
    return process_vm_readv(pid(), &to, 1, &from, 1, 0) == sizeof state;
  }

  // Copies at most the size of the smaller list. Returns the number of bytes; 0 if it has called
  // Lost().
  size_t Copy(std::span<const iovec> to, std::span<const iovec> from) {
    if (own_ == nullptr) return CopyHere(IoList(to), from);
    const ssize_t num_bytes =
        process_vm_readv(pid(), to.data(), std::min<size_t>(to.size(), IOV_MAX), from.data(),
                         std::min<size_t>(from.size(), IOV_MAX), 0);
    if (num_bytes > 0) return static_cast<size_t>(num_bytes);
    host_.Lost(num_bytes < 0 ? ErrnoText("process_vm_readv", errno) : "its memory is gone");
    return 0;
  }

  static size_t CopyHere(const IoList& to, std::span<const iovec> from) {
    size_t copied = 0;
    for (const iovec& entry : from) {
      to.CopyIn(copied, {static_cast<const std::byte*>(entry.iov_base), entry.iov_len});
      copied += entry.iov_len;
    }
    return copied;
  }

  // False, after Lost(), if the sender may have freed its memory before our last copy. While the
  // process of the first read has not ended, no other has its pid.
  bool SourceIsAlive() {
    if (own_ == nullptr) return true;
    std::atomic_thread_fence(std::memory_order_seq_cst);  // after the copy
    StateInfo state{};
    pollfd polled{.fd = pidfd_.get(), .events = POLLIN, .revents = 0};
    const bool alive = ReadState(state) && state.nonce == peer_.nonce && state.failed == 0 &&
                       poll(&polled, 1, 0) == 0;
    if (!alive) host_.Lost("it failed or ended while its memory was read");
    return alive;
  }

  const MemoryState* const own_;
  ConnectionHost& host_;
  std::deque<Pull> pulls_;
  PullOfferInfo peer_{};
  Fd pidfd_;
};

}  // namespace

MemoryState::MemoryState() {
  if (getrandom(&nonce, sizeof nonce, 0) != sizeof nonce) ThrowErrno("getrandom");
}

// Peers that are late must not take what lies there afterwards for the state.
MemoryState::~MemoryState() { explicit_bzero(&nonce, sizeof nonce); }

std::unique_ptr<Connection> OpenProcessVm(const TransportSetup& setup, ConnectionHost& host) {
  if (!setup.same_host) Throw(ErrorCode::kTransport, "the processes are on different hosts");
  return std::make_unique<PullConnection>(setup.memory_state, host);
}

std::unique_ptr<Connection> OpenLocal(ConnectionHost& host) {
  return std::make_unique<PullConnection>(nullptr, host);
}

}  // namespace jaxhet
