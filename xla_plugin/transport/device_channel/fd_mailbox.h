#ifndef XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_FD_MAILBOX_H_
#define XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_FD_MAILBOX_H_

#include <array>
#include <cstdint>

#include "xla_plugin/base/fd.h"

namespace jaxhet {

// Names a mailbox to other processes. It travels between them.
struct FdMailboxInfo {
  std::array<char, 16> name;  // a socket's, in Linux's abstract namespace
  std::array<uint64_t, 2> nonce;
};

// Where another process of this host leaves a file descriptor. The network namespace must be the
// same, too. The name is public (/proc/net/unix), the nonce is not: messages without it are dropped
// before they are queued.
class FdMailbox {
 public:
  FdMailbox();

  const FdMailboxInfo& info() const { return info_; }
  // The descriptor that a process which knows info() has left. Does not block; throws if
  // there is none.
  Fd Take();
  void Close() { socket_.Reset(); }

 private:
  Fd socket_;
  FdMailboxInfo info_{};
};

// Does not block. Throws TransportError if the mailbox can't be reached from here.
void LeaveFd(const FdMailboxInfo& mailbox, const Fd& fd);

}  // namespace jaxhet

#endif  // XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_FD_MAILBOX_H_
