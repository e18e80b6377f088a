#include "xla_plugin/device/device.h"

#include "xla_plugin/base/strings.h"

namespace jaxhet {

std::string DeviceInfo::ToString() const {
  return StrCat(vendor, ":", ordinal, " (", name, pci_bus_id.empty() ? "" : ", ", pci_bus_id, ")");
}

void Device::Values(StreamHandle stream, std::span<const StreamValue> values) {
  for (const auto& [kind, address, value] : values) {
    if (kind == StreamValue::Kind::kWrite) {
      WriteValue(stream, address, value);
    } else {
      WaitValue(stream, address, value);
    }
  }
}

}  // namespace jaxhet
