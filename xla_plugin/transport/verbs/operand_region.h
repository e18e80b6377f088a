#ifndef XLA_PLUGIN_TRANSPORT_VERBS_OPERAND_REGION_H_
#define XLA_PLUGIN_TRANSPORT_VERBS_OPERAND_REGION_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "xla_plugin/device/device.h"
#include "xla_plugin/transport/verbs/device_region.h"

namespace jaxhet::verbs {

// The allocation that a device's operands lie in (XLA's arena), which its NICs send from. They
// can't write there.
class OperandRegion {
 public:
  // `within` is some of that memory; its content is lost. Never throws for what can't be
  // registered: why_not() says why.
  OperandRegion(Device& device, NicMemory::NicList nics, const Options& options,
                std::span<std::byte> within);

  // "" if NICs send from there.
  const std::string& why_not() const { return why_not_; }
  const NicMemory& memory() const { return *region_; }
  // Address that NICs use; none if the operand lies elsewhere.
  std::optional<uint64_t> AddressOf(std::span<const std::byte> operand) const;

 private:
  AddressRange range_{};
  std::unique_ptr<DeviceRegion> region_;
  std::string why_not_;
};

}  // namespace jaxhet::verbs

#endif  // XLA_PLUGIN_TRANSPORT_VERBS_OPERAND_REGION_H_
