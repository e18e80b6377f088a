#ifndef XLA_PLUGIN_TRANSPORT_PROCESS_VM_PROCESS_VM_H_
#define XLA_PLUGIN_TRANSPORT_PROCESS_VM_PROCESS_VM_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>

#include "xla_plugin/transport/transport.h"

namespace jaxhet {

// Words of a process that peers on this host read: a nonce that proves who it is, and whether its
// buffers may be gone. The latter is set before any buffer is released.
struct MemoryState {
  MemoryState();
  ~MemoryState();
  MemoryState(const MemoryState&) = delete;
  MemoryState& operator=(const MemoryState&) = delete;

  void SetFailed() { failed.store(1, std::memory_order_seq_cst); }

  std::array<uint64_t, 2> nonce{};
  std::atomic<uint64_t> failed = 0;
};

// Between processes of one host where the kernel allows process_vm_readv: one copy, from the
// sender's memory into the receiver's.
std::unique_ptr<Connection> OpenProcessVm(const TransportSetup& setup, ConnectionHost& host);

// Between the ranks of one process (a rank and itself included): plain memory copies.
std::unique_ptr<Connection> OpenLocal(ConnectionHost& host);

}  // namespace jaxhet

#endif  // XLA_PLUGIN_TRANSPORT_PROCESS_VM_PROCESS_VM_H_
