#ifndef XLA_PLUGIN_DEVICE_PROOF_H_
#define XLA_PLUGIN_DEVICE_PROOF_H_

#include <cstddef>
#include <span>

#include "xla_plugin/device/device.h"

// Whether memory is what it seems to be: bytes that the device itself writes or reads there. Both
// block.
namespace jaxhet {

void WriteProof(Device& device, void* to, std::span<const std::byte> proof);
bool HasProof(Device& device, const void* from, std::span<const std::byte> proof);

}  // namespace jaxhet

#endif  // XLA_PLUGIN_DEVICE_PROOF_H_
