#ifndef XLA_PLUGIN_DEVICE_CUDA_CUDA_API_H_
#define XLA_PLUGIN_DEVICE_CUDA_CUDA_API_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <utility>

#include "xla_plugin/base/library.h"
#include "xla_plugin/device/device.h"
#include "xla_plugin/device/failure.h"

namespace jaxhet {

// The part of CUDA's driver interface that we use, declared here so that no CUDA is needed to
// build. Device addresses are void*, results and enumerations int. tests/gpu/test_declarations.py
// compares every entry point and every value that has CUDA's name beside it with cuda.h (13.0).
struct CudaApi {
  using Context = struct CudaContextTag*;

  static constexpr std::string_view kVendor = "cuda";

  static constexpr unsigned kStreamNonBlocking = 0x1;     // CU_STREAM_NON_BLOCKING
  static constexpr unsigned kEventDisableTiming = 0x2;    // CU_EVENT_DISABLE_TIMING
  static constexpr unsigned kHostMallocPortable = 0x1;    // CU_MEMHOSTALLOC_PORTABLE
  static constexpr unsigned kHostMallocMapped = 0x2;      // CU_MEMHOSTALLOC_DEVICEMAP
  static constexpr unsigned kHostRegisterPortable = 0x1;  // CU_MEMHOSTREGISTER_PORTABLE
  static constexpr unsigned kHostRegisterMapped = 0x2;    // CU_MEMHOSTREGISTER_DEVICEMAP
  static constexpr unsigned kIpcLazyPeerAccess = 0x1;     // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
  static constexpr unsigned kWaitAtLeast = 0x0;           // CU_STREAM_WAIT_VALUE_GEQ
  static constexpr int kDmaBufFd = 1;                     // CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
  static constexpr unsigned long long kDmaBufOverPcie =
      0x1;                                      // CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE
  static constexpr int kMultiprocessors = 16;   // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
  static constexpr int kCapabilityMajor = 75;   // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
  static constexpr int kCapabilityMinor = 76;   // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
  static constexpr int kGpuDirectRdma = 116;    // CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED
  static constexpr int kDmaBufSupported = 124;  // CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED
  static constexpr int kPosixFd = 1;            // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
  static constexpr int kOnDevice = 1;           // CU_MEM_LOCATION_TYPE_DEVICE
  static constexpr int kReadWrite = 3;          // CU_MEM_ACCESS_FLAGS_PROT_READWRITE
  static constexpr unsigned kOpWait = 1;        // CU_STREAM_MEM_OP_WAIT_VALUE_32
  static constexpr unsigned kOpWrite = 2;       // CU_STREAM_MEM_OP_WRITE_VALUE_32
  // We call the second version of the stream memory operations; it has no attribute for 32 bits.
  static constexpr int kStreamValues = 122;  // CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS

  Library library;
  Function<int(unsigned)> init{library, "cuInit"};
  Function<int(int*)> get_version{library, "cuDriverGetVersion"};
  Function<int(int, const char**)> get_error_name{library, "cuGetErrorName"};
  Function<int(int, const char**)> get_error_string{library, "cuGetErrorString"};

  Function<int(int*)> get_device_count{library, "cuDeviceGetCount"};
  Function<int(int*, int)> device_get{library, "cuDeviceGet"};
  Function<int(char*, int, int)> device_get_name{library, "cuDeviceGetName"};
  Function<int(char*, int, int)> device_get_pci_bus_id{library, "cuDeviceGetPCIBusId"};
  Function<int(int*, int, int)> device_get_attribute{library, "cuDeviceGetAttribute"};

  Function<int(Context*, int)> primary_retain{library, "cuDevicePrimaryCtxRetain"};
  Function<int(int)> primary_release{library, "cuDevicePrimaryCtxRelease_v2"};
  Function<int(Context)> context_push{library, "cuCtxPushCurrent_v2"};
  Function<int(Context*)> context_pop{library, "cuCtxPopCurrent_v2"};

  Function<int(int*, int*)> stream_priority_range{library, "cuCtxGetStreamPriorityRange"};
  Function<int(StreamHandle*, unsigned, int)> stream_create{library, "cuStreamCreateWithPriority"};
  Function<int(StreamHandle)> stream_destroy{library, "cuStreamDestroy_v2"};
  Function<int(StreamHandle)> stream_query{library, "cuStreamQuery"};
  Function<int(StreamHandle)> stream_synchronize{library, "cuStreamSynchronize"};
  Function<int(StreamHandle, EventHandle, unsigned)> stream_wait_event{library,
                                                                       "cuStreamWaitEvent"};
  Function<int(StreamHandle, unsigned, const void*, unsigned)> stream_batch_mem_op{
      library, "cuStreamBatchMemOp_v2"};

  Function<int(EventHandle*, unsigned)> event_create{library, "cuEventCreate"};
  Function<int(EventHandle)> event_destroy{library, "cuEventDestroy_v2"};
  Function<int(EventHandle, StreamHandle)> event_record{library, "cuEventRecord"};

  Function<int(void*, const void*, size_t, StreamHandle)> memcpy_async{library, "cuMemcpyAsync"};
  Function<int(void*, unsigned char, size_t, StreamHandle)> memset_async{library,
                                                                         "cuMemsetD8Async"};
  Function<int(void**, size_t)> malloc{library, "cuMemAlloc_v2"};
  Function<int(void*)> free{library, "cuMemFree_v2"};
  Function<int(void**, size_t, unsigned)> host_malloc{library, "cuMemHostAlloc"};
  Function<int(void*)> host_free{library, "cuMemFreeHost"};
  Function<int(void*, size_t, unsigned)> host_register{library, "cuMemHostRegister_v2"};
  Function<int(void*)> host_unregister{library, "cuMemHostUnregister"};
  Function<int(void**, void*, unsigned)> host_get_device_pointer{library,
                                                                 "cuMemHostGetDevicePointer_v2"};
  Function<int(IpcHandleInfo*, void*)> ipc_get{library, "cuIpcGetMemHandle"};
  Function<int(void**, IpcHandleInfo, unsigned)> ipc_open{library, "cuIpcOpenMemHandle_v2"};
  Function<int(void*)> ipc_close{library, "cuIpcCloseMemHandle"};
  Function<int(void**, size_t*, void*)> get_address_range{library, "cuMemGetAddressRange_v2"};
  Function<int(void*, void*, size_t, int, unsigned long long)> get_handle_for_address_range{
      library, "cuMemGetHandleForAddressRange"};

  Function<int(uint64_t*, void*)> retain_allocation{library, "cuMemRetainAllocationHandle"};
  Function<int(void*, uint64_t, int, unsigned long long)> export_allocation{
      library, "cuMemExportToShareableHandle"};
  Function<int(uint64_t*, void*, int)> import_allocation{library, "cuMemImportFromShareableHandle"};
  Function<int(uint64_t)> release_allocation{library, "cuMemRelease"};
  Function<int(void**, size_t, size_t, void*, unsigned long long)> reserve_addresses{
      library, "cuMemAddressReserve"};
  Function<int(void*, size_t)> free_addresses{library, "cuMemAddressFree"};
  Function<int(void*, size_t, size_t, uint64_t, unsigned long long)> map{library, "cuMemMap"};
  Function<int(void*, size_t)> unmap{library, "cuMemUnmap"};
  Function<int(void*, size_t, const void*, size_t)> set_access{library, "cuMemSetAccess"};

  // Differences from HIP; see Gpu.

  static constexpr unsigned kEventFlags = kEventDisableTiming;

  static constexpr const char* kRetainName = "cuDevicePrimaryCtxRetain";
  static constexpr const char* kEnterName = "cuCtxPushCurrent";
  static constexpr bool kWaitsAcquire = true;

  FailureText Describe(int result) const;
  void ClearLastError() const {}
  // XLA uses the primary context too: its memory and its streams belong to it.
  int Retain(int ordinal, Context* context) const;
  void Release(int ordinal) const;
  int Enter(Context context, Context* before) const;
  void Leave(Context before) const;
  int DestroyStream(StreamHandle stream) const { return stream_destroy(stream); }
  int Allocate(void** memory, size_t num_bytes) const { return malloc(memory, num_bytes); }
  int Copy(void* to, const void* from, size_t num_bytes, StreamHandle stream) const;
  // The following functions return the name of the last call and its result.
  std::pair<const char*, int> Values(StreamHandle stream,
                                     std::span<const StreamValue> values) const;
  std::pair<const char*, int> ExportFd(void* address, int* fd) const;
  std::pair<const char*, int> MapFd(int fd, size_t num_bytes, int ordinal, void** memory) const;
  std::pair<const char*, int> Unmap(AddressRange memory) const;
  std::pair<const char*, int> ExportDmaBuf(void* address, size_t num_bytes, int* fd,
                                           uint64_t* offset) const;
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_DEVICE_CUDA_CUDA_API_H_
