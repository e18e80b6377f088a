#include <algorithm>
#include <array>

#include "xla_plugin/base/error.h"
#include "xla_plugin/device/cuda/cuda_api.h"
#include "xla_plugin/device/device.h"
#include "xla_plugin/device/gpu.h"
#include "xla_plugin/device/hip/hip_api.h"

namespace jaxhet {
namespace {

constexpr std::array kCudaLibraries = {"libcuda.so.1"};
// By its version: that is the one which XLA loads, and a second one would not know XLA's streams.
constexpr std::array kHipLibraries = {"libamdhip64.so.7", "libamdhip64.so.6"};

}  // namespace

std::span<const Vendor> Vendors() {
  static constexpr std::array<Vendor, 2> kVendors = {{
      {"cuda", kCudaLibraries, &ListGpus<CudaApi>, &Gpu<CudaApi>::Open},
      {"hip", kHipLibraries, &ListGpus<HipApi>, &Gpu<HipApi>::Open},
  }};
  return kVendors;
}

const Vendor& VendorOf(std::string_view name) {
  const auto vendors = Vendors();
  const auto found = std::ranges::find(vendors, name, &Vendor::name);
  if (found != vendors.end()) return *found;
  std::string names;
  for (const Vendor& vendor : vendors) names += StrCat(names.empty() ? "" : ", ", vendor.name);
  Throw(ErrorCode::kUsage, "no vendor is called '", name, "'; there are ", names);
}

}  // namespace jaxhet
