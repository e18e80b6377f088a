#ifndef XLA_PLUGIN_DEVICE_PROOF_H_
#define XLA_PLUGIN_DEVICE_PROOF_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "xla_plugin/device/device.h"

// Whether memory is what it seems to be: bytes that the device itself writes or reads there. All
// functions block.
namespace jaxhet {

void WriteProof(Device& device, void* to, std::span<const std::byte> proof);
bool HasProof(Device& device, const void* from, std::span<const std::byte> proof);

// Writes memory as an exchange writes slots, and learns as an exchange does that it is written. The
// host does not wait for the device: that would empty the caches of an AMD GPU.
class PatternWriter {
 public:
  explicit PatternWriter(Device& device);
  ~PatternWriter();
  PatternWriter(const PatternWriter&) = delete;
  PatternWriter& operator=(const PatternWriter&) = delete;

  // Writes other bytes than the last time, and returns them.
  std::vector<std::byte> Write(std::span<std::byte> place);

 private:
  Device& device_;
  PinnedMemory word_;
  Stream program_;
  uint32_t number_ = 0;
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_DEVICE_PROOF_H_
