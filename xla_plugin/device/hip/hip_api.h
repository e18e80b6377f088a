#ifndef XLA_PLUGIN_DEVICE_HIP_HIP_API_H_
#define XLA_PLUGIN_DEVICE_HIP_HIP_API_H_

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>

#include "xla_plugin/base/library.h"
#include "xla_plugin/device/device.h"
#include "xla_plugin/device/failure.h"

namespace jaxhet {

// The part of HIP's runtime interface that we use, declared here so that no ROCm is needed to
// build. Results and enumerations are int. tests/gpu/test_declarations.py compares every entry
// point and every value that has HIP's name beside it with hip/hip_runtime_api.h (compared
// with 5.2.3 and 6.3.0; the optional ones, which are of 7, by their documentation). Not run on AMD
// hardware.
struct HipApi {
  using Context = int;  // the ordinal of the thread's current device

  static constexpr std::string_view kVendor = "hip";

  static constexpr unsigned kStreamNonBlocking = 0x1;     // hipStreamNonBlocking
  static constexpr unsigned kEventDisableTiming = 0x2;    // hipEventDisableTiming
  static constexpr unsigned kEventToSystem = 0x80000000;  // hipEventReleaseToSystem
  static constexpr unsigned kMallocUncached = 0x3;        // hipDeviceMallocUncached (6)
  static constexpr unsigned kHostMallocPortable = 0x1;    // hipHostMallocPortable
  static constexpr unsigned kHostMallocMapped = 0x2;      // hipHostMallocMapped
  static constexpr unsigned kHostRegisterPortable = 0x1;  // hipHostRegisterPortable
  static constexpr unsigned kHostRegisterMapped = 0x2;    // hipHostRegisterMapped
  static constexpr unsigned kIpcLazyPeerAccess = 0x1;     // hipIpcMemLazyEnablePeerAccess (6)
  static constexpr unsigned kWaitAtLeast = 0x0;           // hipStreamWaitValueGte
  static constexpr uint32_t kWaitMask = 0xFFFFFFFF;       // all bits of the word
  static constexpr int kCopyDefault = 4;                  // hipMemcpyDefault
  static constexpr int kStreamValues = 10013;             // hipDeviceAttributeCanUseStreamWaitValue
  static constexpr int kDmaBufSupported = 93;             // hipDeviceAttributeDmaBufSupported (7)
  static constexpr int kGpuDirectRdma = 10011;            // hipDeviceAttributeIsLargeBar
  static constexpr int kCapabilityMajor = 23;  // hipDeviceAttributeComputeCapabilityMajor
  static constexpr int kCapabilityMinor = 61;  // hipDeviceAttributeComputeCapabilityMinor
  static constexpr int kMultiprocessors = 63;  // hipDeviceAttributeMultiprocessorCount

  Library library;
  Function<int(unsigned)> init{library, "hipInit"};
  Function<int(int*)> get_version{library, "hipRuntimeGetVersion"};
  Function<const char*(int)> get_error_name{library, "hipGetErrorName"};
  Function<const char*(int)> get_error_string{library, "hipGetErrorString"};
  Function<int()> get_last_error{library, "hipGetLastError"};

  Function<int(int*)> get_device_count{library, "hipGetDeviceCount"};
  Function<int(int*, int)> device_get{library, "hipDeviceGet"};
  Function<int(char*, int, int)> device_get_name{library, "hipDeviceGetName"};
  Function<int(char*, int, int)> device_get_pci_bus_id{library, "hipDeviceGetPCIBusId"};
  Function<int(int*, int, int)> device_get_attribute{library, "hipDeviceGetAttribute"};
  Function<int(int*)> get_device{library, "hipGetDevice"};
  Function<int(int)> set_device{library, "hipSetDevice"};

  Function<int(int*, int*)> stream_priority_range{library, "hipDeviceGetStreamPriorityRange"};
  Function<int(StreamHandle*, unsigned, int)> stream_create{library, "hipStreamCreateWithPriority"};
  Function<int(StreamHandle)> stream_destroy{library, "hipStreamDestroy"};
  Function<int(StreamHandle)> stream_query{library, "hipStreamQuery"};
  Function<int(StreamHandle)> stream_synchronize{library, "hipStreamSynchronize"};
  Function<int(StreamHandle, EventHandle, unsigned)> stream_wait_event{library,
                                                                       "hipStreamWaitEvent"};
  Function<int(StreamHandle, void*, uint32_t, unsigned)> stream_write_value{
      library, "hipStreamWriteValue32"};
  Function<int(StreamHandle, void*, uint32_t, unsigned, uint32_t)> stream_wait_value{
      library, "hipStreamWaitValue32"};

  Function<int(EventHandle*, unsigned)> event_create{library, "hipEventCreateWithFlags"};
  Function<int(EventHandle)> event_destroy{library, "hipEventDestroy"};
  Function<int(EventHandle, StreamHandle)> event_record{library, "hipEventRecord"};

  Function<int(void*, const void*, size_t, int, StreamHandle)> memcpy_async{library,
                                                                            "hipMemcpyAsync"};
  Function<int(void*, unsigned char, size_t, StreamHandle)> memset_async{library,
                                                                         "hipMemsetD8Async"};
  Function<int(void**, size_t, unsigned)> malloc{library, "hipExtMallocWithFlags"};
  Function<int(void*)> free{library, "hipFree"};
  Function<int(void**, size_t, unsigned)> host_malloc{library, "hipHostMalloc"};
  Function<int(void*)> host_free{library, "hipHostFree"};
  Function<int(void*, size_t, unsigned)> host_register{library, "hipHostRegister"};
  Function<int(void*)> host_unregister{library, "hipHostUnregister"};
  Function<int(void**, void*, unsigned)> host_get_device_pointer{library,
                                                                 "hipHostGetDevicePointer"};
  Function<int(IpcHandleInfo*, void*)> ipc_get{library, "hipIpcGetMemHandle"};
  Function<int(void**, IpcHandleInfo, unsigned)> ipc_open{library, "hipIpcOpenMemHandle"};
  Function<int(void*)> ipc_close{library, "hipIpcCloseMemHandle"};
  Function<int(void**, size_t*, void*)> get_address_range{library, "hipMemGetAddressRange"};

  using ExportPortable = Function<int(const void*, size_t, int*, uint64_t*)>;
  // Function of the HSA runtime, which HIP is linked with.
  ExportPortable hsa_export_dmabuf{library, "hsa_amd_portable_export_dmabuf",
                                   ExportPortable::kOptional};

  // Differences from CUDA; see Gpu.

  // An event empties the caches, so that NICs and other devices can read what the stream wrote.
  static constexpr unsigned kEventFlags = kEventDisableTiming | kEventToSystem;

  static constexpr const char* kRetainName = "hipSetDevice";
  static constexpr const char* kEnterName = "hipSetDevice";
  // A wait is a kernel that polls. What follows it may still read the device's own cache.
  static constexpr bool kWaitsAcquire = false;

  FailureText Describe(int result) const;
  void ClearLastError() const { get_last_error(); }
  static int Retain(int ordinal, Context* context);
  void Release(int /*ordinal*/) const {}  // HIP's contexts live as long as the process
  int Enter(Context context, Context* before) const;
  void Leave(Context before) const;
  int DestroyStream(StreamHandle stream) const;
  int Allocate(void** memory, size_t num_bytes) const;
  int Copy(void* to, const void* from, size_t num_bytes, StreamHandle stream) const;
  // The following functions return the name of the last call and its result.
  std::pair<const char*, int> Values(StreamHandle stream,
                                     std::span<const StreamValue> values) const;
  std::pair<const char*, int> ExportDmaBuf(void* address, size_t num_bytes, int* fd,
                                           uint64_t* offset) const;
  // XLA's arena is of hipMalloc, which has IPC handles.
  static std::pair<const char*, int> ExportFd(void* /*address*/, int* /*fd*/) { return NoFds(); }
  static std::pair<const char*, int> MapFd(int /*fd*/, size_t /*num_bytes*/, int /*ordinal*/,
                                           void** /*memory*/) {
    return NoFds();
  }
  static std::pair<const char*, int> Unmap(AddressRange /*memory*/) { return NoFds(); }

 private:
  static std::pair<const char*, int> NoFds() {
    return {"hipMemExportToShareableHandle", kGpuNotSupported};
  }
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_DEVICE_HIP_HIP_API_H_
