#ifndef XLA_PLUGIN_DEVICE_CUDA_CUDA_H_
#define XLA_PLUGIN_DEVICE_CUDA_CUDA_H_

#include <memory>
#include <vector>

#include "xla_plugin/device/device.h"

namespace jaxhet {

std::vector<DeviceInfo> ListCudaDevices(Vendor::Libraries libraries);
std::unique_ptr<Device> OpenCudaDevice(Vendor::Libraries libraries, int ordinal);

}  // namespace jaxhet

#endif  // XLA_PLUGIN_DEVICE_CUDA_CUDA_H_
