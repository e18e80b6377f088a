#ifndef XLA_PLUGIN_NET_VERBS_LOOPBACK_H_
#define XLA_PLUGIN_NET_VERBS_LOOPBACK_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "xla_plugin/net/verbs/device.h"
#include "xla_plugin/net/verbs/memory.h"
#include "xla_plugin/net/verbs/nics.h"

namespace jaxhet::verbs {

// A queue pair that is connected with itself: the NIC reads and writes registered memory as it does
// for a peer. Functions block, for two seconds at most, and throw TransportError, after which the
// queue pair is of no use.
class Loopback {
 public:
  static constexpr size_t kMostBytes = 4096;  // largest size of one call

  Loopback(const std::shared_ptr<Nic>& nic, const Options& options);

  const std::string& name() const { return nic_.info.name; }

  void Write(const MemoryRegion& to, uint64_t address, std::span<const std::byte> bytes);
  // Proves the send path: an RDMA write out of `from`, which needs only local read access.
  void Send(const MemoryRegion& from, uint64_t address, std::span<std::byte> bytes);
  // Makes the NIC's writes visible to the device that owns the memory.
  void Flush(const MemoryRegion& region, uint64_t address);

 private:
  struct Memory {
    uint64_t address;
    const MemoryRegion& region;
  };

  void Execute(int opcode, const Memory& local, const Memory& remote, size_t num_bytes);
  void Await(uint64_t wr_id);
  Memory host() const { return {host_.slots().address(0), host_.slots().memory->region(0)}; }

  Nic& nic_;
  Staging host_;
  CompletionQueue cq_;
  QueuePair qp_;
  uint64_t last_wr_id_ = 0;
};

}  // namespace jaxhet::verbs

#endif  // XLA_PLUGIN_NET_VERBS_LOOPBACK_H_
