#include "xla_plugin/device/device.h"

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/strings.h"

namespace jaxhet {

std::string DeviceInfo::ToString() const {
  return StrCat(vendor, ":", ordinal, " (", name, pci_bus_id.empty() ? "" : ", ", pci_bus_id, ")");
}

std::optional<uint64_t> AddressRange::OffsetOf(std::span<const std::byte> bytes) const {
  const auto begin = reinterpret_cast<uintptr_t>(base);
  const auto address = reinterpret_cast<uintptr_t>(bytes.data());
  if (address < begin || !InBounds(address - begin, bytes.size(), num_bytes)) return std::nullopt;
  return address - begin;
}

}  // namespace jaxhet
