#include "xla_plugin/device/proof.h"

#include <cstring>

namespace jaxhet {

void WriteProof(Device& device, void* to, std::span<const std::byte> proof) {
  const PinnedMemory host = device.AllocatePinned(proof.size());
  const Stream stream = device.CreateStream(StreamPriority::kNormal);
  std::memcpy(host.get(), proof.data(), proof.size());
  device.Copy(stream.get(), to, device.DeviceAddress(host.get()), proof.size());
  device.Synchronize(stream.get());
}

bool HasProof(Device& device, const void* from, std::span<const std::byte> proof) {
  const PinnedMemory host = device.AllocatePinned(proof.size());
  const Stream stream = device.CreateStream(StreamPriority::kNormal);
  device.Copy(stream.get(), device.DeviceAddress(host.get()), from, proof.size());
  device.Synchronize(stream.get());
  return std::memcmp(host.get(), proof.data(), proof.size()) == 0;
}

}  // namespace jaxhet
