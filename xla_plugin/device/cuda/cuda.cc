#include "xla_plugin/device/cuda/cuda.h"

#include "xla_plugin/device/cuda/cuda_api.h"
#include "xla_plugin/device/gpu.h"

namespace jaxhet {

FailureText CudaApi::Describe(int result) const {
  const char* name = nullptr;
  const char* text = nullptr;
  if (get_error_name(result, &name) != kGpuSuccess) name = "an unknown result";
  if (get_error_string(result, &text) != kGpuSuccess) text = "no description";
  return {.code = result, .name = name, .text = text};
}

int CudaApi::Retain(int ordinal, Context* context) const {
  int device = 0;
  const int result = device_get(&device, ordinal);
  return result == kGpuSuccess ? primary_retain(context, device) : result;
}

void CudaApi::Release(int ordinal) const {
  int device = 0;
  if (device_get(&device, ordinal) == kGpuSuccess) primary_release(device);
}

int CudaApi::Enter(Context context, Context* /*before*/) const { return context_push(context); }

void CudaApi::Leave(Context before) const { context_pop(&before); }

int CudaApi::Copy(void* to, const void* from, size_t num_bytes, StreamHandle stream) const {
  return memcpy_async(to, from, num_bytes, stream);
}

int CudaApi::WaitAtLeast(StreamHandle stream, void* address, uint32_t value) const {
  return stream_wait_value(stream, address, value, kWaitAtLeast);
}

std::pair<const char*, int> CudaApi::ExportDmaBuf(void* address, size_t num_bytes, int* fd,
                                                  uint64_t* /*offset*/) const {
  // Over PCIe is what a NIC needs where the GPU has another way to the memory too (Grace); drivers
  // that don't know the flag, or devices without such a mapping, refuse it.
  int result = get_handle_for_address_range(fd, address, num_bytes, kDmaBufFd, kDmaBufOverPcie);
  if (result != kGpuSuccess) {
    result = get_handle_for_address_range(fd, address, num_bytes, kDmaBufFd, 0);
  }
  return {get_handle_for_address_range.name(), result};
}

std::vector<DeviceInfo> ListCudaDevices(Vendor::Libraries libraries) {
  return ListGpus<CudaApi>(libraries);
}

std::unique_ptr<Device> OpenCudaDevice(Vendor::Libraries libraries, int ordinal) {
  return Gpu<CudaApi>::Open(libraries, ordinal);
}

}  // namespace jaxhet
