#ifndef XLA_PLUGIN_DEVICE_HIP_HIP_H_
#define XLA_PLUGIN_DEVICE_HIP_HIP_H_

#include <memory>
#include <vector>

#include "xla_plugin/device/device.h"

namespace jaxhet {

std::vector<DeviceInfo> ListHipDevices(Vendor::Libraries libraries);
std::unique_ptr<Device> OpenHipDevice(Vendor::Libraries libraries, int ordinal);

}  // namespace jaxhet

#endif  // XLA_PLUGIN_DEVICE_HIP_HIP_H_
