#include "xla_plugin/device/device.h"

#include <cstring>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"
#include "xla_plugin/base/strings.h"
#include "xla_plugin/device/failure.h"

namespace jaxhet {
namespace {

std::string_view Advice(int code) {
  switch (code) {
    case kGpuInvalidValue:
    case kGpuInvalidHandle:
    case kGpuNotFound:
      return "Is the address or handle one of this device, and still alive?";
    case kGpuOutOfMemory:
      return "Leave more memory beside XLA's: lower XLA_PYTHON_CLIENT_MEM_FRACTION.";
    case kGpuNoDevice:
    case kGpuInvalidDevice:
      return "See CUDA_VISIBLE_DEVICES or ROCR_VISIBLE_DEVICES, and what nvidia-smi or rocm-smi "
             "shows.";
    case kGpuInvalidContext:
      return "Memory of another process can't be opened in that process itself.";
    case kGpuOperatingSystem:
      return "See dmesg; a container must have the device files and share the host's IPC "
             "namespace.";
    case kGpuIllegalAddress:
    case kGpuLaunchFailed:
      return "Earlier work on the device failed, and the process can't use it any more: restart "
             "it; "
             "compute-sanitizer or rocgdb finds the work.";
    case kGpuNotSupported:
      return "This device, its driver or its kernel module doesn't have it; another path is used "
             "where there is one.";
    default:
      return "dmesg may say more.";
  }
}

}  // namespace

void WriteProof(Device& device, void* to, std::span<const std::byte> proof) {
  const PinnedMemory host = device.AllocatePinned(proof.size());
  const Stream stream = device.CreateStream(StreamPriority::kNormal);
  std::memcpy(host.get(), proof.data(), proof.size());
  device.Copy(stream.get(), to, device.DeviceAddress(host.get()), proof.size());
  device.Synchronize(stream.get());
}

bool HasProof(Device& device, const void* from, std::span<const std::byte> proof) {
  const PinnedMemory host = device.AllocatePinned(proof.size());
  const Stream stream = device.CreateStream(StreamPriority::kNormal);
  device.Copy(stream.get(), device.DeviceAddress(host.get()), from, proof.size());
  device.Synchronize(stream.get());
  return std::memcmp(host.get(), proof.data(), proof.size()) == 0;
}

std::string DeviceInfo::ToString() const {
  return StrCat(vendor, ":", ordinal, " (", name, pci_bus_id.empty() ? "" : ", ", pci_bus_id, ")");
}

std::optional<uint64_t> AddressRange::OffsetOf(std::span<const std::byte> bytes) const {
  const auto begin = reinterpret_cast<uintptr_t>(base);
  const auto address = reinterpret_cast<uintptr_t>(bytes.data());
  if (address < begin || !InBounds(address - begin, bytes.size(), num_bytes)) return std::nullopt;
  return address - begin;
}

void ThrowFailure(std::string_view call, std::string_view where, const FailureText& failure) {
  Throw(ErrorCode::kDevice, call, " on ", where, " failed: ", failure.name, " (", failure.code,
        "), ", failure.text, ". ", Advice(failure.code));
}

}  // namespace jaxhet
