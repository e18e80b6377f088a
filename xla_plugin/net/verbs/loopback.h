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
  Loopback(const std::shared_ptr<Nic>& nic, const Options& options);

  const std::string& name() const { return nic_.info.name; }

  // Copies bytes of a region to another place there, by an RDMA write.
  void Copy(const MemoryRegion& region, std::span<const std::byte> from, const std::byte* to);
  // Makes the NIC's writes visible to the device that owns the memory.
  void Flush(const MemoryRegion& region, uint64_t address);

 private:
  struct Memory {
    uint64_t address;
    const MemoryRegion& region;
  };

  void Execute(int opcode, const Memory& local, const Memory& remote, size_t num_bytes);
  void Await(uint64_t wr_id);

  Nic& nic_;
  Staging host_;
  CompletionQueue cq_;
  QueuePair qp_;
  uint64_t last_wr_id_ = 0;
};

}  // namespace jaxhet::verbs

#endif  // XLA_PLUGIN_NET_VERBS_LOOPBACK_H_
