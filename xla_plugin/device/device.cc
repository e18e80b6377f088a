#include "xla_plugin/device/device.h"

#include "xla_plugin/base/strings.h"

namespace jaxhet {

std::string DeviceInfo::ToString() const {
  return StrCat(vendor, ":", ordinal, " (", name, pci_bus_id.empty() ? "" : ", ", pci_bus_id, ")");
}

}  // namespace jaxhet
