#include "xla_plugin/transport/process_vm/process_vm.h"

#include <poll.h>
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
#include "xla_plugin/transport/shared_memory.h"

namespace jaxhet {
namespace {

struct PullOfferInfo {
  SharedMemoryInfo page;
  uint64_t probe_address;  // where page.nonce lies in the sender's memory
};

class ProcessVmConnection final : public PullConnection {
 public:
  ProcessVmConnection(const SharedPage& page, ConnectionHost& host)
      : PullConnection(host), page_(page) {}

  std::string Offer() override {
    const SharedMemory& memory = page_.memory();
    const PullOfferInfo offer{memory.info(), reinterpret_cast<uint64_t>(memory.nonce_address())};
    return {reinterpret_cast<const char*>(&offer), sizeof offer};
  }

  void Accept(std::string_view text) override {
    PullOfferInfo offer{};
    if (text.size() != sizeof offer) Throw(ErrorCode::kTransport, "the peer's offer is cut");
    std::memcpy(&offer, text.data(), sizeof offer);
    peer_page_ = std::make_unique<SharedPage>(offer.page);
    pid_ = static_cast<pid_t>(offer.page.pid);
    pidfd_.Reset(static_cast<int>(syscall(SYS_pidfd_open, pid_, 0)));
    if (!pidfd_) ThrowErrno("pidfd_open");
    Probe(offer);
  }

 private:
  void Probe(const PullOfferInfo& offer) const {
    auto nonce = offer.page.nonce;
    nonce.fill(0);
    const iovec to = ObjectIovec(nonce);
    const iovec from = ToIovec(reinterpret_cast<const void*>(offer.probe_address), sizeof nonce);
    if (process_vm_readv(pid_, &to, 1, &from, 1, 0) < 0) ThrowErrno("process_vm_readv");
    if (nonce != offer.page.nonce) {
      Throw(ErrorCode::kTransport, "process_vm_readv reads another process than the peer");
    }
  }

  size_t Copy(std::span<const iovec> to, std::span<const iovec> from) override {
    const ssize_t num_bytes =
        process_vm_readv(pid_, to.data(), std::min<size_t>(to.size(), IOV_MAX), from.data(),
                         std::min<size_t>(from.size(), IOV_MAX), 0);
    if (num_bytes > 0) return static_cast<size_t>(num_bytes);
    host().Lost(num_bytes < 0 ? ErrnoText("process_vm_readv", errno) : "its memory is gone");
    return 0;
  }

  // While the process of the probe has not ended, no other has its pid.
  bool SourceIsAlive() override {
    pollfd polled{.fd = pidfd_.get(), .events = POLLIN, .revents = 0};
    const bool has_ended = poll(&polled, 1, 0) != 0;
    const bool alive = !has_ended && !peer_page_->HasFailed();
    if (!alive) host().Lost("it failed or ended while its memory was read");
    return alive;
  }

  const SharedPage& page_;
  std::unique_ptr<SharedPage> peer_page_;
  pid_t pid_ = 0;
  Fd pidfd_;
};

}  // namespace

std::unique_ptr<Connection> OpenProcessVm(const TransportSetup& setup, ConnectionHost& host) {
  if (!setup.same_host) Throw(ErrorCode::kTransport, "the processes are on different hosts");
  return std::make_unique<ProcessVmConnection>(*setup.page, host);
}

}  // namespace jaxhet
