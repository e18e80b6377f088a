#include "xla_plugin/transport/verbs/operand_region.h"

#include "xla_plugin/base/error.h"

namespace jaxhet::verbs {

OperandRegion::OperandRegion(Device& device, NicMemory::NicList nics, const Options& options,
                             std::span<std::byte> within) {
  try {
    range_ = device.sharing().RangeOf(within.data());
    const std::span memory(static_cast<std::byte*>(range_.base), range_.num_bytes);
    region_ = std::make_unique<DeviceRegion>(device, nics, options, memory, std::span(&within, 1),
                                             DeviceRegion::Use::kRead);
  } catch (const Error& error) {
    why_not_ = error.text();
  }
}

std::optional<uint64_t> OperandRegion::AddressOf(std::span<const std::byte> operand) const {
  if (!region_ || !range_.OffsetOf(operand)) return std::nullopt;
  return reinterpret_cast<uint64_t>(operand.data());
}

}  // namespace jaxhet::verbs
