#ifndef XLA_PLUGIN_DEVICE_HOST_HOST_H_
#define XLA_PLUGIN_DEVICE_HOST_HOST_H_

#include <memory>
#include <vector>

#include "xla_plugin/device/device.h"

namespace jaxhet {

std::vector<DeviceInfo> ListHostDevices(Vendor::Libraries libraries);
std::unique_ptr<Device> OpenHostDevice(Vendor::Libraries libraries, int ordinal);

}  // namespace jaxhet

#endif  // XLA_PLUGIN_DEVICE_HOST_HOST_H_
