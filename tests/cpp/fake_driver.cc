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
#define DRIVER(name, parameters, result) \
  ENTRY int name parameters {            \
    constexpr const char* call = #name;  \
    return result;                       \
  }
// The same function of both drivers.
#define BOTH(cuda, hip, parameters, result) \
  DRIVER(cuda, parameters, result)          \
  DRIVER(hip, parameters, result)
using jaxhet::EventHandle;
using jaxhet::IpcHandleInfo;
using jaxhet::StreamHandle;
using namespace jaxhet::testing::fake_driver;  // NOLINT(google-build-using-namespace)

BOTH(cuInit, hipInit, (unsigned flags), Record(call, flags))
BOTH(cuDriverGetVersion, hipRuntimeGetVersion, (int* version), Give(call, version, 7000))
BOTH(cuDeviceGetCount, hipGetDeviceCount, (int* count), Give(call, count, 2))
BOTH(cuDeviceGet, hipDeviceGet, (int* device, int ordinal), Give(call, device, ordinal, ordinal))
BOTH(cuDeviceGetName, hipDeviceGetName, (char* name, int size, int device),
     GiveText(call, name, size, "Fake GPU", device))
BOTH(cuDeviceGetPCIBusId, hipDeviceGetPCIBusId, (char* id, int size, int device),
     GiveText(call, id, size, "0000:01:00.0", device))
DRIVER(cuDeviceGetAttribute, (int* value, int attribute, int device),
       Give(call, value, attribute == jaxhet::CudaApi::kMultiprocessors ? 100 + device : 1,
            attribute, device))
DRIVER(hipDeviceGetAttribute, (int* value, int attribute, int device),
       Give(call, value, attribute == jaxhet::HipApi::kMultiprocessors ? 100 + device : 1,
            attribute, device))
DRIVER(cuCtxGetStreamPriorityRange, (int* low, int* high), (*low = 0, Give(call, high, -5)))
DRIVER(hipDeviceGetStreamPriorityRange, (int* low, int* high), (*low = 1, Give(call, high, -1)))
BOTH(cuStreamCreateWithPriority, hipStreamCreateWithPriority,
     (StreamHandle * stream, unsigned flags, int priority), Create(call, stream, flags, priority))
BOTH(cuStreamDestroy_v2, hipStreamDestroy, (StreamHandle stream), Record(call, stream))
BOTH(cuStreamQuery, hipStreamQuery, (StreamHandle stream), Record(call, stream))
BOTH(cuStreamSynchronize, hipStreamSynchronize, (StreamHandle stream), Record(call, stream))
BOTH(cuStreamWaitEvent, hipStreamWaitEvent,
     (StreamHandle stream, EventHandle event, unsigned flags), Record(call, stream, event, flags))
BOTH(cuEventCreate, hipEventCreateWithFlags, (EventHandle * event, unsigned flags),
     Create(call, event, flags))
BOTH(cuEventDestroy_v2, hipEventDestroy, (EventHandle event), Record(call, event))
BOTH(cuEventRecord, hipEventRecord, (EventHandle event, StreamHandle stream),
     Record(call, event, stream))
BOTH(cuMemsetD8Async, hipMemsetD8Async,
     (void* to, unsigned char value, size_t num_bytes, StreamHandle stream),
     Record(call, to, int{value}, num_bytes, stream))
BOTH(cuMemHostAlloc, hipHostMalloc, (void** host, size_t num_bytes, unsigned flags),
     Create(call, host, num_bytes, flags))
BOTH(cuMemFreeHost, hipHostFree, (void* host), Record(call, host))
BOTH(cuMemHostRegister_v2, hipHostRegister, (void* host, size_t num_bytes, unsigned flags),
     Record(call, host, num_bytes, flags))
BOTH(cuMemHostUnregister, hipHostUnregister, (void* host), Record(call, host))
BOTH(cuMemHostGetDevicePointer_v2, hipHostGetDevicePointer,
     (void** address, void* host, unsigned flags), Give(call, address, host, host, flags))
BOTH(cuIpcGetMemHandle, hipIpcGetMemHandle, (IpcHandleInfo * handle, void* memory),
     GetHandle(call, handle, memory))
BOTH(cuIpcOpenMemHandle_v2, hipIpcOpenMemHandle,
     (void** memory, IpcHandleInfo handle, unsigned flags),
     Create(call, memory, ByteOf(handle), flags))
BOTH(cuIpcCloseMemHandle, hipIpcCloseMemHandle, (void* memory), Record(call, memory))
BOTH(cuMemGetAddressRange_v2, hipMemGetAddressRange,
     (void** base, size_t* num_bytes, void* address), GiveRange(call, base, num_bytes, address))
BOTH(cuMemFree_v2, hipFree, (void* memory), Record(call, memory))

// Functions of CUDA only, or that differ.

DRIVER(cuMemcpyAsync, (void* to, const void* from, size_t num_bytes, StreamHandle stream),
       Record(call, to, from, num_bytes, stream))
DRIVER(cuMemAlloc_v2, (void** memory, size_t num_bytes), Create(call, memory, num_bytes))
DRIVER(cuStreamBatchMemOp_v2,
       (StreamHandle stream, unsigned count, const void* /*ops*/, unsigned flags),
       Record(call, stream, count, flags))
DRIVER(cuMemRetainAllocationHandle, (uint64_t* allocation, void* address),
       Give(call, allocation, uint64_t{0x77}, address))
DRIVER(cuMemExportToShareableHandle,
       (void* fd, uint64_t allocation, int type, unsigned long long flags),
       Give(call, static_cast<int*>(fd), -1, allocation, type, flags))
DRIVER(cuMemImportFromShareableHandle, (uint64_t* allocation, void* fd, int type),
       Give(call, allocation, uint64_t{0x88}, fd, type))
DRIVER(cuMemRelease, (uint64_t allocation), Record(call, allocation))
DRIVER(cuMemAddressReserve,
       (void** address, size_t num_bytes, size_t alignment, void* wish, unsigned long long flags),
       Create(call, address, num_bytes, alignment, wish, flags))
DRIVER(cuMemAddressFree, (void* address, size_t num_bytes), Record(call, address, num_bytes))
DRIVER(cuMemMap,
       (void* address, size_t num_bytes, size_t offset, uint64_t allocation,
        unsigned long long flags),
       Record(call, address, num_bytes, offset, allocation, flags))
DRIVER(cuMemUnmap, (void* address, size_t num_bytes), Record(call, address, num_bytes))
DRIVER(cuMemSetAccess, (void* address, size_t num_bytes, const void* /*access*/, size_t count),
       Record(call, address, num_bytes, count))
DRIVER(cuMemGetHandleForAddressRange,
       (void* fd, void* address, size_t num_bytes, int type, unsigned long long flags),
       Give(call, static_cast<int*>(fd), -1, address, num_bytes, type, flags))
ENTRY int cuGetErrorName(int, const char** name) {
  *name = "CUDA_ERROR_OF_THE_TEST";
  return 0;
}
ENTRY int cuGetErrorString(int, const char** text) {
  *text = "a failure of the test";
  return 0;
}
DRIVER(cuDevicePrimaryCtxRetain, (void** context, int device), Create(call, context, device))
DRIVER(cuDevicePrimaryCtxRelease_v2, (int device), Record(call, device))
ENTRY int cuCtxPushCurrent_v2(void*) {
  ++context_depth;
  return 0;
}
ENTRY int cuCtxPopCurrent_v2(void**) {
  --context_depth;
  return 0;
}

// The same of HIP.

DRIVER(hipStreamWriteValue32, (StreamHandle stream, void* address, uint32_t value, unsigned flags),
       Record(call, stream, address, value, flags))
DRIVER(hipStreamWaitValue32,
       (StreamHandle stream, void* address, uint32_t value, unsigned flags, uint32_t mask),
       Record(call, stream, address, value, flags, mask))
DRIVER(hipMemcpyAsync,
       (void* to, const void* from, size_t num_bytes, int kind, StreamHandle stream),
       Record(call, to, from, num_bytes, kind, stream))
DRIVER(hipExtMallocWithFlags, (void** memory, size_t num_bytes, unsigned flags),
       Create(call, memory, num_bytes, flags))
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
DRIVER(hsa_amd_portable_export_dmabuf,
       (const void* address, size_t num_bytes, int* fd, uint64_t* offset),
       (*offset = 0x100, Give(call, fd, -1, address, num_bytes)))
// NOLINTEND(readability-identifier-naming,misc-use-internal-linkage)
