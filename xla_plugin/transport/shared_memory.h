#ifndef XLA_PLUGIN_TRANSPORT_SHARED_MEMORY_H_
#define XLA_PLUGIN_TRANSPORT_SHARED_MEMORY_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "xla_plugin/base/fd.h"

namespace jaxhet {

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
  enum class Access { kRead, kReadWrite };
  // Maps memory of the peer.
  explicit SharedMemory(const SharedMemoryInfo& info, Access access = Access::kRead);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  std::byte* data() const { return base_ + kHeaderBytes; }
  size_t num_bytes() const { return info_.num_bytes; }
  // All of it, and what is before and after data() in the same pages.
  std::span<std::byte> pages() const;
  const SharedMemoryInfo& info() const { return info_; }
  // The nonce in memory; its value is info().nonce.
  const std::byte* nonce_address() const { return base_; }
  // No process can open it any more; mappings stay.
  void CloseFd() { fd_.Reset(); }

 private:
  static constexpr size_t kHeaderBytes = 64;

  void Map(int protection);

  SharedMemoryInfo info_{};
  Fd fd_;
  std::byte* base_ = nullptr;
};

// Word that tells a process's peers on this host that its buffers may be gone: set before
// any of them is released, looked at after a pull.
class SharedPage {
 public:
  SharedPage() : memory_(sizeof(std::atomic<uint64_t>)) {}
  explicit SharedPage(const SharedMemoryInfo& info);

  SharedMemory& memory() { return memory_; }
  const SharedMemory& memory() const { return memory_; }
  void SetFailed() { failed().store(1, std::memory_order_seq_cst); }
  bool HasFailed() const;

 private:
  std::atomic<uint64_t>& failed() const {
    return *reinterpret_cast<std::atomic<uint64_t>*>(memory_.data());
  }

  SharedMemory memory_;
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_TRANSPORT_SHARED_MEMORY_H_
