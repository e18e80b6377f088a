#ifndef XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_SHARED_MEMORY_H_
#define XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_SHARED_MEMORY_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

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
  // Takes the descriptor that a process with our info() has sent. Does not block; throws if none
  // has arrived.
  Fd Take();
  void Close() { socket_.Reset(); }

 private:
  Fd socket_;
  FdMailboxInfo info_{};
};

// Does not block. Throws TransportError if the mailbox can't be reached from here.
void LeaveFd(const FdMailboxInfo& mailbox, const Fd& fd);

// Where another process of this host finds a SharedMemory of ours.
struct SharedMemoryInfo {
  int64_t pid;
  int64_t fd;
  uint64_t num_bytes;
  std::array<uint64_t, 2> nonce;
};

// Anonymous memory that other processes open through /proc/<pid>/fd: it has no name that could be
// left behind. It starts with a nonce, so that a pid of another namespace is not mistaken for ours.
// The size is sealed, so that no access can raise SIGBUS.
class SharedMemory {
 public:
  // Ours: writable, zeroed but for the nonce, num_bytes beyond it.
  explicit SharedMemory(size_t num_bytes);
  // Maps memory of the peer.
  explicit SharedMemory(const SharedMemoryInfo& info);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  std::byte* data() const { return base_ + kHeaderBytes; }
  // All of it, and what is before and after data() in the same pages.
  std::span<std::byte> pages() const;
  const SharedMemoryInfo& info() const { return info_; }
  // No process can open it any more; mappings stay.
  void CloseFd() { fd_.Reset(); }

 private:
  static constexpr size_t kHeaderBytes = 64;

  void Map();

  SharedMemoryInfo info_{};
  Fd fd_;
  std::byte* base_ = nullptr;
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_SHARED_MEMORY_H_
