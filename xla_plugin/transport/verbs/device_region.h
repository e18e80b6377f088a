#ifndef XLA_PLUGIN_TRANSPORT_VERBS_DEVICE_REGION_H_
#define XLA_PLUGIN_TRANSPORT_VERBS_DEVICE_REGION_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <string_view>

#include "xla_plugin/device/device.h"
#include "xla_plugin/device/proof.h"
#include "xla_plugin/transport/verbs/loopback.h"
#include "xla_plugin/transport/verbs/slot_memory.h"

namespace jaxhet::verbs {

// Memory of a device, registered as a dma-buf or else through the peer-memory module. A way is used
// only if it was proven: some kernels register memory and then lose what is written to it.
class DeviceRegion final : public NicMemory {
 public:
  enum class Use {
    kRead,          // each NIC has sent what the device wrote; it can't write
    kReadAndWrite,  // and the device has read what each NIC wrote
  };

  // Is proven at `places`, of Loopback::kMostBytes at most, whose content is lost. Throws
  // TransportError if no way works.
  DeviceRegion(Device& device, NicList nics, const Options& options, std::span<std::byte> memory,
               std::span<const std::span<std::byte>> places, Use use);
  ~DeviceRegion() { Deregister(); }

  // Proves it again, and throws TransportError at the first wrong byte. `load_bytes`: see
  // PatternWriter.
  void Prove(Device& device, std::span<const std::span<std::byte>> places, int rounds,
             size_t load_bytes);
  // "dma-buf" or "peer memory".
  std::string_view way() const { return way_; }
  // After NIC `nic` has written to `address`: lets the device see it, or throws TransportError.
  void Flush(uint64_t address, size_t nic);

 private:
  using RegisterFunction = void (DeviceRegion::*)(Device&, std::span<std::byte>, int);

  void RegisterDmaBuf(Device& device, std::span<std::byte> memory, int access);
  void RegisterPeerMemory(Device& device, std::span<std::byte> memory, int access);
  void ProveRead(const Device& device, PatternWriter& writer, size_t nic,
                 std::span<std::byte> place);
  void ProveWrite(Device& device, size_t nic, std::span<std::byte> place);

  const Use use_;
  std::string_view way_;
  std::deque<Loopback> loopbacks_;  // one for each NIC
};

// Proves for `rounds` rounds, while the device is busy, that the NICs send what it has just
// written: in memory as slots lie in, and as operands do. Returns "", or why a job would not let
// NICs reach the device's memory at all. Throws TransportError for bytes that are not right.
std::string ProveSends(Device& device, NicMemory::NicList nics, const Options& options, int rounds);

}  // namespace jaxhet::verbs

#endif  // XLA_PLUGIN_TRANSPORT_VERBS_DEVICE_REGION_H_
