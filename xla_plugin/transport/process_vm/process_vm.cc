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

#include "xla_plugin/base/error.h"
#include "xla_plugin/base/fd.h"
#include "xla_plugin/transport/pull.h"

namespace jaxhet {
namespace {

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

class ProcessVmConnection final : public PullConnection {
 public:
  ProcessVmConnection(const MemoryState& own, ConnectionHost& host)
      : PullConnection(host), own_(own) {}

  std::string Offer() override {
    const PullOfferInfo offer{getpid(), own_.nonce, reinterpret_cast<uint64_t>(&own_)};
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

 private:
  pid_t pid() const { return static_cast<pid_t>(peer_.pid); }

  bool ReadState(StateInfo& state) const {
    const iovec to = ObjectIovec(state);
    const iovec from = ToIovec(reinterpret_cast<const void*>(peer_.state_address), sizeof state);
    return process_vm_readv(pid(), &to, 1, &from, 1, 0) == sizeof state;
  }

  size_t Copy(std::span<const iovec> to, std::span<const iovec> from) override {
    const ssize_t num_bytes =
        process_vm_readv(pid(), to.data(), std::min<size_t>(to.size(), IOV_MAX), from.data(),
                         std::min<size_t>(from.size(), IOV_MAX), 0);
    if (num_bytes > 0) return static_cast<size_t>(num_bytes);
    host().Lost(num_bytes < 0 ? ErrnoText("process_vm_readv", errno) : "its memory is gone");
    return 0;
  }

  // While the process of the first read has not ended, no other has its pid.
  bool SourceIsAlive() override {
    std::atomic_thread_fence(std::memory_order_seq_cst);  // after the copy
    StateInfo state{};
    pollfd polled{.fd = pidfd_.get(), .events = POLLIN, .revents = 0};
    const bool alive = ReadState(state) && state.nonce == peer_.nonce && state.failed == 0 &&
                       poll(&polled, 1, 0) == 0;
    if (!alive) host().Lost("it failed or ended while its memory was read");
    return alive;
  }

  const MemoryState& own_;
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
  return std::make_unique<ProcessVmConnection>(*setup.memory_state, host);
}

}  // namespace jaxhet
