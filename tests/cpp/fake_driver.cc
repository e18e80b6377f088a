#include "tests/cpp/fake_driver.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>
#include <utility>

#include "xla_plugin/device/cuda/cuda_api.h"
#include "xla_plugin/device/device.h"
#include "xla_plugin/device/failure.h"
#include "xla_plugin/device/hip/hip_api.h"

namespace jaxhet::testing::fake_driver {
namespace {

std::mutex mutex;
std::vector<std::string> calls;
std::map<std::string, int, std::less<>> failures;
uintptr_t last_handle = 0;

thread_local int context_depth = 0;
thread_local int current_device = 0;
thread_local int last_error = 0;

template <typename... Arguments>
int Record(std::string_view function, const Arguments&... arguments) {
  std::ostringstream text;
  text << std::hex << std::showbase << function << "(";
  ((text << arguments << ", "), ...);
  const std::lock_guard lock(mutex);
  std::string call = text.str();
  if (call.ends_with(", ")) call.resize(call.size() - 2);
  calls.push_back(call + ")");
  const auto failure = failures.find(function);
  if (failure == failures.end()) return kGpuSuccess;
  const int result = failure->second;
  failures.erase(failure);
  last_error = result;
  return result;
}

// Gives out a new handle.
template <typename Handle, typename... Arguments>
int Create(std::string_view function, Handle* handle, Arguments... arguments) {
  const int result = Record(function, arguments...);
  const std::lock_guard lock(mutex);
  if (result == kGpuSuccess) *handle = reinterpret_cast<Handle>(last_handle += 0x100);
  return result;
}

template <typename T, typename... Arguments>
int Give(std::string_view function, T* to, T value, Arguments... arguments) {
  const int result = Record(function, arguments...);
  if (result == kGpuSuccess) *to = value;
  return result;
}

int GiveText(std::string_view function, char* to, int size, const char* text, int device) {
  std::strncpy(to, text, static_cast<size_t>(size));
  return Record(function, device);
}

int GiveRange(std::string_view function, void** base, size_t* num_bytes, void* address) {
  *base = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(address) & ~uintptr_t{0xFFF});
  *num_bytes = 0x2000;
  return Record(function, address);
}

int GetHandle(std::string_view function, IpcHandleInfo* handle, void* address) {
  handle->bytes.fill(std::byte{7});
  return Record(function, address);
}

int ByteOf(const IpcHandleInfo& handle) { return static_cast<int>(handle.bytes.back()); }

}  // namespace

void Reset() {
  const std::lock_guard lock(mutex);
  calls.clear();
  failures.clear();
  last_handle = 0;
}

void FailNext(std::string_view function, int result) {
  const std::lock_guard lock(mutex);
  failures[std::string(function)] = result;
}

std::vector<std::string> Calls() {
  const std::lock_guard lock(mutex);
  return calls;
}

int ContextDepth() { return context_depth; }
int& CurrentDevice() { return current_device; }
int& LastError() { return last_error; }

}  // namespace jaxhet::testing::fake_driver

// NOLINTBEGIN(readability-identifier-naming,misc-use-internal-linkage): the names are the vendors'.
#define ENTRY extern "C" __attribute__((visibility("default")))
#define RECORDED(name, parameters, ...) \
  ENTRY int name parameters { return Record(#name, __VA_ARGS__); }
#define CREATED(name, parameters, ...) \
  ENTRY int name parameters { return Create(#name, __VA_ARGS__); }
using jaxhet::EventHandle;
using jaxhet::IpcHandleInfo;
using jaxhet::StreamHandle;
using namespace jaxhet::testing::fake_driver;  // NOLINT(google-build-using-namespace)

// Functions of both drivers.

RECORDED(cuInit, (unsigned flags), flags)
ENTRY int cuDriverGetVersion(int* version) { return Give("cuDriverGetVersion", version, 7000); }
ENTRY int cuDeviceGetCount(int* count) { return Give("cuDeviceGetCount", count, 2); }
ENTRY int cuDeviceGet(int* device, int ordinal) {
  return Give("cuDeviceGet", device, ordinal, ordinal);
}
ENTRY int cuDeviceGetName(char* name, int size, int device) {
  return GiveText("cuDeviceGetName", name, size, "Fake GPU", device);
}
ENTRY int cuDeviceGetPCIBusId(char* id, int size, int device) {
  return GiveText("cuDeviceGetPCIBusId", id, size, "0000:01:00.0", device);
}
ENTRY int cuDeviceGetAttribute(int* value, int attribute, int device) {
  const bool is_count = attribute == jaxhet::CudaApi::kMultiprocessors;
  return Give("cuDeviceGetAttribute", value, is_count ? 100 + device : 1, attribute, device);
}
ENTRY int cuCtxGetStreamPriorityRange(int* low, int* high) {
  *low = 0;
  return Give("cuCtxGetStreamPriorityRange", high, -5);
}
CREATED(cuStreamCreateWithPriority, (StreamHandle * stream, unsigned flags, int priority), stream,
        flags, priority)
RECORDED(cuStreamDestroy_v2, (StreamHandle stream), stream)
RECORDED(cuStreamQuery, (StreamHandle stream), stream)
RECORDED(cuStreamSynchronize, (StreamHandle stream), stream)
RECORDED(cuStreamWaitEvent, (StreamHandle stream, EventHandle event, unsigned flags), stream, event,
         flags)
ENTRY int cuStreamBatchMemOp_v2(StreamHandle stream, unsigned count, const void* ops,
                                unsigned flags) {
  std::ostringstream text;
  for (unsigned i = 0; i < count; ++i) {
    const auto* const words = static_cast<const uint64_t*>(ops) + size_t{6} * i;
    text << (i == 0 ? "" : " ") << std::hex << static_cast<uint32_t>(words[0]) << ":" << words[1]
         << ":" << words[2] << ":" << static_cast<uint32_t>(words[3]);
  }
  return Record("cuStreamBatchMemOp_v2", stream, count, text.str(), flags);
}
ENTRY int cuMemRetainAllocationHandle(uint64_t* allocation, void* address) {
  return Give("cuMemRetainAllocationHandle", allocation, uint64_t{0x77}, address);
}
ENTRY int cuMemExportToShareableHandle(void* fd, uint64_t allocation, int type,
                                       unsigned long long flags) {
  return Give("cuMemExportToShareableHandle", static_cast<int*>(fd), -1, allocation, type, flags);
}
ENTRY int cuMemImportFromShareableHandle(uint64_t* allocation, void* fd, int type) {
  return Give("cuMemImportFromShareableHandle", allocation, uint64_t{0x88}, fd, type);
}
RECORDED(cuMemRelease, (uint64_t allocation), allocation)
CREATED(cuMemAddressReserve,
        (void** address, size_t num_bytes, size_t alignment, void* wish, unsigned long long flags),
        address, num_bytes, alignment, wish, flags)
RECORDED(cuMemAddressFree, (void* address, size_t num_bytes), address, num_bytes)
RECORDED(cuMemMap,
         (void* address, size_t num_bytes, size_t offset, uint64_t allocation,
          unsigned long long flags),
         address, num_bytes, offset, allocation, flags)
RECORDED(cuMemUnmap, (void* address, size_t num_bytes), address, num_bytes)
ENTRY int cuMemSetAccess(void* address, size_t num_bytes, const void* access, size_t count) {
  const auto* const words = static_cast<const int*>(access);
  return Record("cuMemSetAccess", address, num_bytes, words[0], words[1], words[2], count);
}
CREATED(cuEventCreate, (EventHandle * event, unsigned flags), event, flags)
RECORDED(cuEventDestroy_v2, (EventHandle event), event)
RECORDED(cuEventRecord, (EventHandle event, StreamHandle stream), event, stream)
RECORDED(cuMemcpyAsync, (void* to, const void* from, size_t num_bytes, StreamHandle stream), to,
         from, num_bytes, stream)
RECORDED(cuMemsetD8Async, (void* to, unsigned char value, size_t num_bytes, StreamHandle stream),
         to, int{value}, num_bytes, stream)
CREATED(cuMemAlloc_v2, (void** memory, size_t num_bytes), memory, num_bytes)
RECORDED(cuMemFree_v2, (void* memory), memory)
CREATED(cuMemHostAlloc, (void** host, size_t num_bytes, unsigned flags), host, num_bytes, flags)
RECORDED(cuMemFreeHost, (void* host), host)
RECORDED(cuMemHostRegister_v2, (void* host, size_t num_bytes, unsigned flags), host, num_bytes,
         flags)
RECORDED(cuMemHostUnregister, (void* host), host)
ENTRY int cuMemHostGetDevicePointer_v2(void** address, void* host, unsigned flags) {
  return Give("cuMemHostGetDevicePointer_v2", address, host, host, flags);
}
ENTRY int cuIpcGetMemHandle(IpcHandleInfo* handle, void* memory) {
  return GetHandle("cuIpcGetMemHandle", handle, memory);
}
ENTRY int cuIpcOpenMemHandle_v2(void** memory, IpcHandleInfo handle, unsigned flags) {
  return Create("cuIpcOpenMemHandle_v2", memory, ByteOf(handle), flags);
}
RECORDED(cuIpcCloseMemHandle, (void* memory), memory)
ENTRY int cuMemGetAddressRange_v2(void** base, size_t* num_bytes, void* address) {
  return GiveRange("cuMemGetAddressRange_v2", base, num_bytes, address);
}
ENTRY int cuMemGetHandleForAddressRange(void* fd, void* address, size_t num_bytes, int type,
                                        unsigned long long flags) {
  return Give("cuMemGetHandleForAddressRange", static_cast<int*>(fd), -1, address, num_bytes, type,
              flags);
}
RECORDED(hipInit, (unsigned flags), flags)
ENTRY int hipRuntimeGetVersion(int* version) { return Give("hipRuntimeGetVersion", version, 7000); }
ENTRY int hipGetDeviceCount(int* count) { return Give("hipGetDeviceCount", count, 2); }
ENTRY int hipDeviceGet(int* device, int ordinal) {
  return Give("hipDeviceGet", device, ordinal, ordinal);
}
ENTRY int hipDeviceGetName(char* name, int size, int device) {
  return GiveText("hipDeviceGetName", name, size, "Fake GPU", device);
}
ENTRY int hipDeviceGetPCIBusId(char* id, int size, int device) {
  return GiveText("hipDeviceGetPCIBusId", id, size, "0000:01:00.0", device);
}
ENTRY int hipDeviceGetAttribute(int* value, int attribute, int device) {
  const bool is_count = attribute == jaxhet::HipApi::kMultiprocessors;
  return Give("hipDeviceGetAttribute", value, is_count ? 100 + device : 1, attribute, device);
}
ENTRY int hipDeviceGetStreamPriorityRange(int* low, int* high) {
  *low = 1;
  return Give("hipDeviceGetStreamPriorityRange", high, -1);
}
CREATED(hipStreamCreateWithPriority, (StreamHandle * stream, unsigned flags, int priority), stream,
        flags, priority)
RECORDED(hipStreamDestroy, (StreamHandle stream), stream)
RECORDED(hipStreamQuery, (StreamHandle stream), stream)
RECORDED(hipStreamSynchronize, (StreamHandle stream), stream)
RECORDED(hipStreamWaitEvent, (StreamHandle stream, EventHandle event, unsigned flags), stream,
         event, flags)
RECORDED(hipStreamWriteValue32,
         (StreamHandle stream, void* address, uint32_t value, unsigned flags), stream, address,
         value, flags)
RECORDED(hipStreamWaitValue32,
         (StreamHandle stream, void* address, uint32_t value, unsigned flags, uint32_t mask),
         stream, address, value, flags, mask)
CREATED(hipEventCreateWithFlags, (EventHandle * event, unsigned flags), event, flags)
RECORDED(hipEventDestroy, (EventHandle event), event)
RECORDED(hipEventRecord, (EventHandle event, StreamHandle stream), event, stream)
RECORDED(hipMemcpyAsync,
         (void* to, const void* from, size_t num_bytes, int kind, StreamHandle stream), to, from,
         num_bytes, kind, stream)
RECORDED(hipMemsetD8Async, (void* to, unsigned char value, size_t num_bytes, StreamHandle stream),
         to, int{value}, num_bytes, stream)
CREATED(hipExtMallocWithFlags, (void** memory, size_t num_bytes, unsigned flags), memory, num_bytes,
        flags)
RECORDED(hipFree, (void* memory), memory)
CREATED(hipHostMalloc, (void** host, size_t num_bytes, unsigned flags), host, num_bytes, flags)
RECORDED(hipHostFree, (void* host), host)
RECORDED(hipHostRegister, (void* host, size_t num_bytes, unsigned flags), host, num_bytes, flags)
RECORDED(hipHostUnregister, (void* host), host)
ENTRY int hipHostGetDevicePointer(void** address, void* host, unsigned flags) {
  return Give("hipHostGetDevicePointer", address, host, host, flags);
}
ENTRY int hipIpcGetMemHandle(IpcHandleInfo* handle, void* memory) {
  return GetHandle("hipIpcGetMemHandle", handle, memory);
}
ENTRY int hipIpcOpenMemHandle(void** memory, IpcHandleInfo handle, unsigned flags) {
  return Create("hipIpcOpenMemHandle", memory, ByteOf(handle), flags);
}
RECORDED(hipIpcCloseMemHandle, (void* memory), memory)
ENTRY int hipMemGetAddressRange(void** base, size_t* num_bytes, void* address) {
  return GiveRange("hipMemGetAddressRange", base, num_bytes, address);
}

// Functions of CUDA only.

ENTRY int cuGetErrorName(int, const char** name) {
  *name = "CUDA_ERROR_OF_THE_TEST";
  return 0;
}
ENTRY int cuGetErrorString(int, const char** text) {
  *text = "a failure of the test";
  return 0;
}
CREATED(cuDevicePrimaryCtxRetain, (void** context, int device), context, device)
RECORDED(cuDevicePrimaryCtxRelease_v2, (int device), device)
ENTRY int cuCtxPushCurrent_v2(void*) {
  ++context_depth;
  return 0;
}
ENTRY int cuCtxPopCurrent_v2(void**) {
  --context_depth;
  return 0;
}

// Functions of HIP only.

ENTRY const char* hipGetErrorName(int) { return "hipErrorOfTheTest"; }
ENTRY const char* hipGetErrorString(int) { return "a failure of the test"; }
ENTRY int hipGetLastError() { return std::exchange(last_error, 0); }
ENTRY int hipGetDevice(int* device) {
  *device = current_device;
  return 0;
}
ENTRY int hipSetDevice(int device) {
  current_device = device;
  return 0;
}
ENTRY int hsa_amd_portable_export_dmabuf(const void* address, size_t num_bytes, int* fd,
                                         uint64_t* offset) {
  *offset = 0x100;
  return Give("hsa_amd_portable_export_dmabuf", fd, -1, address, num_bytes);
}
// NOLINTEND(readability-identifier-naming,misc-use-internal-linkage)
