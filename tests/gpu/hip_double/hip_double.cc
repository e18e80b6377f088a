// A libamdhip64 over CUDA's driver, so that every HIP call of ours runs on a real GPU where no AMD
// GPU is at hand. It holds the entry points of HipApi, no more, and counts the calls of each. What
// it shows is that our calls are in order and mean what we think; not how AMD's runtime takes them.

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <utility>

#include "xla_plugin/device/cuda/cuda_api.h"
#include "xla_plugin/device/hip/hip_api.h"

namespace jaxhet {
namespace {

constexpr int kVersion = 70000000;  // HIP 7.0.0

thread_local int current_device = 0;
thread_local int last_error = kGpuSuccess;

const CudaApi& Cuda() {
  static const auto* const cuda = [] {
    static constexpr std::array kNames = {"libcuda.so.1"};
    return new CudaApi{Library(kNames)};
  }();
  return *cuda;
}

// The calls of one entry point. They live as long as the library.
class Counter {
 public:
  explicit Counter(const char* name) noexcept : name_(name) { first = this; }
  void Add() { ++calls_; }

  static size_t Write(char* text, size_t size) {
    size_t length = 0;
    for (const Counter* counter = first; counter != nullptr; counter = counter->next_) {
      const int written =
          std::snprintf(length < size ? text + length : nullptr, length < size ? size - length : 0,
                        "%s %ld\n", counter->name_, counter->calls_.load());
      length += static_cast<size_t>(written);
    }
    return length;
  }

 private:
  static inline Counter* first = nullptr;  // only the loader's thread changes it

  const char* name_;
  std::atomic<long> calls_ = 0;
  Counter* next_ = first;
};

// CUDA numbers its results as HIP does, where both have one, with these exceptions.
int ToHip(int cuda_result) {
  constexpr int kHipUnknown = 999;
  constexpr int kCudaStubLibrary = 34;
  constexpr int kHipInsufficientDriver = 35;
  if (cuda_result == kCudaStubLibrary) return kHipInsufficientDriver;
  return cuda_result > kHipUnknown ? kHipUnknown : cuda_result;
}

int Return(int cuda_result) {
  const int result = ToHip(cuda_result);
  if (result != kGpuSuccess) last_error = result;  // not-ready too, as HIP does it
  return result;
}

// Makes the primary context of the thread's device current: HIP's way, which has no stack.
int UseDevice() {
  static constexpr size_t kMaxDevices = 64;
  static std::array<std::atomic<CudaApi::Context>, kMaxDevices> contexts{};
  if (current_device < 0 || std::cmp_greater_equal(current_device, kMaxDevices)) {
    return kGpuInvalidDevice;
  }
  auto& slot = contexts[static_cast<size_t>(current_device)];
  CudaApi::Context context = slot;
  if (context == nullptr) {
    int device = 0;
    int result = Cuda().device_get(&device, current_device);
    if (result == kGpuSuccess) result = Cuda().primary_retain(&context, device);
    if (result != kGpuSuccess) return result;
    slot = context;
  }
  CudaApi::Context before{};
  Cuda().context_pop(&before);  // fails on an empty stack, which is fine
  return Cuda().context_push(context);
}

template <typename... Parameters, typename... Arguments>
int OnDevice(const Function<int(Parameters...)>& function, Arguments... arguments) {
  const int ready = UseDevice();
  return Return(ready == kGpuSuccess ? function(arguments...) : ready);
}

int SetValue(StreamHandle stream, StreamValue::Kind kind, void* address, uint32_t value) {
  const std::array<StreamValue, 1> one = {{{kind, address, value}}};
  const int ready = UseDevice();
  return Return(ready == kGpuSuccess ? Cuda().Values(stream, one).second : ready);
}

const char* TextOf(const Function<int(int, const char**)>& function, int result) {
  const char* text = nullptr;
  return function(result, &text) == kGpuSuccess ? text : "unknown to CUDA";
}

}  // namespace
}  // namespace jaxhet

// NOLINTBEGIN(readability-identifier-naming,misc-use-internal-linkage): the names are HIP's.
using namespace jaxhet;  // NOLINT(google-build-using-namespace)

// The signature of an entry point must be the one by which HipApi calls it.
#define ENTRY(member, result, name, ...)                                              \
  extern "C" __attribute__((visibility("default"))) result name(__VA_ARGS__);         \
  static_assert(std::is_same_v<decltype(name), decltype(HipApi::member)::Signature>); \
  namespace {                                                                         \
  Counter counter_##name(#name);                                                      \
  }                                                                                   \
  result name(__VA_ARGS__)
#define COUNT(name) counter_##name.Add()

extern "C" __attribute__((visibility("default"))) size_t hipDoubleCalls(char* text, size_t size) {
  return Counter::Write(text, size);
}

ENTRY(init, int, hipInit, unsigned flags) {
  COUNT(hipInit);
  return Return(Cuda().init(flags));
}

ENTRY(get_version, int, hipRuntimeGetVersion, int* version) {
  COUNT(hipRuntimeGetVersion);
  *version = kVersion;
  return kGpuSuccess;
}

ENTRY(get_error_name, const char*, hipGetErrorName, int result) {
  COUNT(hipGetErrorName);
  return TextOf(Cuda().get_error_name, result);
}

ENTRY(get_error_string, const char*, hipGetErrorString, int result) {
  COUNT(hipGetErrorString);
  return TextOf(Cuda().get_error_string, result);
}

ENTRY(get_last_error, int, hipGetLastError) {
  COUNT(hipGetLastError);
  return std::exchange(last_error, kGpuSuccess);
}

ENTRY(get_device_count, int, hipGetDeviceCount, int* count) {
  COUNT(hipGetDeviceCount);
  return Return(Cuda().get_device_count(count));
}

ENTRY(device_get, int, hipDeviceGet, int* device, int ordinal) {
  COUNT(hipDeviceGet);
  return Return(Cuda().device_get(device, ordinal));
}

ENTRY(device_get_name, int, hipDeviceGetName, char* name, int size, int device) {
  COUNT(hipDeviceGetName);
  return Return(Cuda().device_get_name(name, size, device));
}

ENTRY(device_get_pci_bus_id, int, hipDeviceGetPCIBusId, char* id, int size, int device) {
  COUNT(hipDeviceGetPCIBusId);
  return Return(Cuda().device_get_pci_bus_id(id, size, device));
}

ENTRY(device_get_attribute, int, hipDeviceGetAttribute, int* value, int attribute, int device) {
  COUNT(hipDeviceGetAttribute);
  int cuda_attribute = 0;
  switch (attribute) {
    case HipApi::kStreamValues:
      cuda_attribute = CudaApi::kStreamValues;
      break;
    case HipApi::kDmaBufSupported:
      cuda_attribute = CudaApi::kDmaBufSupported;
      break;
    case HipApi::kGpuDirectRdma:
      cuda_attribute = CudaApi::kGpuDirectRdma;
      break;
    case HipApi::kCapabilityMajor:
      cuda_attribute = CudaApi::kCapabilityMajor;
      break;
    case HipApi::kCapabilityMinor:
      cuda_attribute = CudaApi::kCapabilityMinor;
      break;
    case HipApi::kMultiprocessors:
      cuda_attribute = CudaApi::kMultiprocessors;
      break;
    default:
      return Return(kGpuInvalidValue);
  }
  return Return(Cuda().device_get_attribute(value, cuda_attribute, device));
}

ENTRY(get_device, int, hipGetDevice, int* device) {
  COUNT(hipGetDevice);
  *device = current_device;
  return kGpuSuccess;
}

ENTRY(set_device, int, hipSetDevice, int device) {
  COUNT(hipSetDevice);
  current_device = device;
  return kGpuSuccess;
}

ENTRY(stream_priority_range, int, hipDeviceGetStreamPriorityRange, int* lowest, int* highest) {
  COUNT(hipDeviceGetStreamPriorityRange);
  return OnDevice(Cuda().stream_priority_range, lowest, highest);
}

ENTRY(stream_create, int, hipStreamCreateWithPriority, StreamHandle* stream, unsigned flags,
      int priority) {
  COUNT(hipStreamCreateWithPriority);
  return OnDevice(Cuda().stream_create, stream, flags, priority);
}

ENTRY(stream_destroy, int, hipStreamDestroy, StreamHandle stream) {
  COUNT(hipStreamDestroy);
  return OnDevice(Cuda().stream_destroy, stream);
}

ENTRY(stream_query, int, hipStreamQuery, StreamHandle stream) {
  COUNT(hipStreamQuery);
  return OnDevice(Cuda().stream_query, stream);
}

ENTRY(stream_synchronize, int, hipStreamSynchronize, StreamHandle stream) {
  COUNT(hipStreamSynchronize);
  return OnDevice(Cuda().stream_synchronize, stream);
}

ENTRY(stream_wait_event, int, hipStreamWaitEvent, StreamHandle stream, EventHandle event,
      unsigned flags) {
  COUNT(hipStreamWaitEvent);
  return OnDevice(Cuda().stream_wait_event, stream, event, flags);
}

ENTRY(stream_write_value, int, hipStreamWriteValue32, StreamHandle stream, void* address,
      uint32_t value, unsigned /*flags*/) {
  COUNT(hipStreamWriteValue32);
  return SetValue(stream, StreamValue::Kind::kWrite, address, value);
}

ENTRY(stream_wait_value, int, hipStreamWaitValue32, StreamHandle stream, void* address,
      uint32_t value, unsigned flags, uint32_t mask) {
  COUNT(hipStreamWaitValue32);
  if (flags != HipApi::kWaitAtLeast || mask != HipApi::kWaitMask) return Return(kGpuNotSupported);
  return SetValue(stream, StreamValue::Kind::kWait, address, value);
}

ENTRY(event_create, int, hipEventCreateWithFlags, EventHandle* event, unsigned flags) {
  COUNT(hipEventCreateWithFlags);
  return OnDevice(Cuda().event_create, event, flags & ~HipApi::kEventToSystem);
}

ENTRY(event_destroy, int, hipEventDestroy, EventHandle event) {
  COUNT(hipEventDestroy);
  return OnDevice(Cuda().event_destroy, event);
}

ENTRY(event_record, int, hipEventRecord, EventHandle event, StreamHandle stream) {
  COUNT(hipEventRecord);
  return OnDevice(Cuda().event_record, event, stream);
}

ENTRY(memcpy_async, int, hipMemcpyAsync, void* to, const void* from, size_t num_bytes, int kind,
      StreamHandle stream) {
  COUNT(hipMemcpyAsync);
  if (kind != HipApi::kCopyDefault) return Return(kGpuNotSupported);
  return OnDevice(Cuda().memcpy_async, to, from, num_bytes, stream);
}

ENTRY(memset_async, int, hipMemsetD8Async, void* to, unsigned char value, size_t num_bytes,
      StreamHandle stream) {
  COUNT(hipMemsetD8Async);
  return OnDevice(Cuda().memset_async, to, value, num_bytes, stream);
}

ENTRY(malloc, int, hipExtMallocWithFlags, void** memory, size_t num_bytes, unsigned /*flags*/) {
  COUNT(hipExtMallocWithFlags);
  return OnDevice(Cuda().malloc, memory, num_bytes);
}

ENTRY(free, int, hipFree, void* memory) {
  COUNT(hipFree);
  return OnDevice(Cuda().free, memory);
}

ENTRY(host_malloc, int, hipHostMalloc, void** host, size_t num_bytes, unsigned flags) {
  COUNT(hipHostMalloc);
  return OnDevice(Cuda().host_malloc, host, num_bytes, flags);
}

ENTRY(host_free, int, hipHostFree, void* host) {
  COUNT(hipHostFree);
  return OnDevice(Cuda().host_free, host);
}

ENTRY(host_register, int, hipHostRegister, void* host, size_t num_bytes, unsigned flags) {
  COUNT(hipHostRegister);
  return OnDevice(Cuda().host_register, host, num_bytes, flags);
}

ENTRY(host_unregister, int, hipHostUnregister, void* host) {
  COUNT(hipHostUnregister);
  return OnDevice(Cuda().host_unregister, host);
}

ENTRY(host_get_device_pointer, int, hipHostGetDevicePointer, void** address, void* host,
      unsigned flags) {
  COUNT(hipHostGetDevicePointer);
  return OnDevice(Cuda().host_get_device_pointer, address, host, flags);
}

ENTRY(ipc_get, int, hipIpcGetMemHandle, IpcHandleInfo* handle, void* memory) {
  COUNT(hipIpcGetMemHandle);
  return OnDevice(Cuda().ipc_get, handle, memory);
}

ENTRY(ipc_open, int, hipIpcOpenMemHandle, void** memory, IpcHandleInfo handle, unsigned flags) {
  COUNT(hipIpcOpenMemHandle);
  if (flags != HipApi::kIpcLazyPeerAccess) return Return(kGpuInvalidValue);  // HIP 6 does the same
  return OnDevice(Cuda().ipc_open, memory, handle, CudaApi::kIpcLazyPeerAccess);
}

ENTRY(ipc_close, int, hipIpcCloseMemHandle, void* memory) {
  COUNT(hipIpcCloseMemHandle);
  return OnDevice(Cuda().ipc_close, memory);
}

ENTRY(get_address_range, int, hipMemGetAddressRange, void** base, size_t* num_bytes,
      void* address) {
  COUNT(hipMemGetAddressRange);
  return OnDevice(Cuda().get_address_range, base, num_bytes, address);
}

ENTRY(hsa_export_dmabuf, int, hsa_amd_portable_export_dmabuf, const void* address, size_t num_bytes,
      int* fd, uint64_t* offset) {
  COUNT(hsa_amd_portable_export_dmabuf);
  *offset = 0;
  return OnDevice(Cuda().get_handle_for_address_range, static_cast<void*>(fd),
                  const_cast<void*>(address), num_bytes, CudaApi::kDmaBufFd, 0ULL);
}
// NOLINTEND(readability-identifier-naming,misc-use-internal-linkage)
