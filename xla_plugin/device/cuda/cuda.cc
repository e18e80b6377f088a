#include <algorithm>
#include <vector>

#include "xla_plugin/device/cuda/cuda_api.h"

namespace jaxhet {
namespace {

// CUstreamBatchMemOpParams, of a write or a wait.
struct CudaMemOp {
  uint32_t operation;
  void* address;
  uint64_t value;
  uint32_t flags;
  void* alias;
  uint64_t unused;
};
static_assert(sizeof(CudaMemOp) == 48);

// CUmemAccessDesc
struct CudaAccess {
  int location_type;
  int device;
  int flags;
};

constexpr size_t kMostMemOps = 256;

}  // namespace

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

std::pair<const char*, int> CudaApi::Values(StreamHandle stream,
                                            std::span<const StreamValue> values) const {
  int result = kGpuSuccess;
  while (result == kGpuSuccess && !values.empty()) {
    const auto batch = values.first(std::min(values.size(), kMostMemOps));
    values = values.subspan(batch.size());
    std::vector<CudaMemOp> ops;
    for (const auto& [kind, address, value] : batch) {
      const bool is_wait = kind == StreamValue::Kind::kWait;
      ops.push_back({.operation = is_wait ? kOpWait : kOpWrite,
                     .address = address,
                     .value = value,
                     .flags = is_wait ? kWaitAtLeast : 0,
                     .alias = nullptr,
                     .unused = 0});
    }
    result = stream_batch_mem_op(stream, static_cast<unsigned>(ops.size()), ops.data(), 0);
  }
  return {stream_batch_mem_op.name(), result};
}

std::pair<const char*, int> CudaApi::ExportFd(void* address, int* fd) const {
  uint64_t allocation = 0;
  int result = retain_allocation(&allocation, address);
  if (result != kGpuSuccess) return {retain_allocation.name(), result};
  result = export_allocation(fd, allocation, kPosixFd, 0);
  release_allocation(allocation);
  return {export_allocation.name(), result};
}

std::pair<const char*, int> CudaApi::MapFd(int fd, size_t num_bytes, int ordinal,
                                           void** memory) const {
  CudaAccess access{.location_type = kOnDevice, .device = 0, .flags = kReadWrite};
  int result = device_get(&access.device, ordinal);
  if (result != kGpuSuccess) return {device_get.name(), result};
  uint64_t allocation = 0;
  result = import_allocation(
      &allocation, reinterpret_cast<void*>(static_cast<uintptr_t>(static_cast<unsigned>(fd))),
      kPosixFd);
  if (result != kGpuSuccess) return {import_allocation.name(), result};
  result = reserve_addresses(memory, num_bytes, 0, nullptr, 0);
  if (result != kGpuSuccess) {
    release_allocation(allocation);
    return {reserve_addresses.name(), result};
  }
  result = map(*memory, num_bytes, 0, allocation, 0);
  release_allocation(allocation);  // the mapping keeps it
  if (result != kGpuSuccess) {
    free_addresses(*memory, num_bytes);
    return {map.name(), result};
  }
  result = set_access(*memory, num_bytes, &access, 1);
  if (result != kGpuSuccess) Unmap({.base = *memory, .num_bytes = num_bytes});
  return {set_access.name(), result};
}

std::pair<const char*, int> CudaApi::Unmap(AddressRange memory) const {
  const int result = unmap(memory.base, memory.num_bytes);
  if (result != kGpuSuccess) return {unmap.name(), result};
  return {free_addresses.name(), free_addresses(memory.base, memory.num_bytes)};
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

}  // namespace jaxhet
