#include "xla_plugin/device/hip/hip_api.h"

namespace jaxhet {

FailureText HipApi::Describe(int result) const {
  return {.code = result, .name = get_error_name(result), .text = get_error_string(result)};
}

int HipApi::Retain(int ordinal, Context* context) {
  *context = ordinal;
  return kGpuSuccess;
}

int HipApi::Enter(Context context, Context* before) const {
  const int result = get_device(before);
  if (result != kGpuSuccess || *before == context) return result;
  return set_device(context);
}

void HipApi::Leave(Context before) const { set_device(before); }

// HIP would wait for the stream's work, which after a failed job may never end. Such a stream
// stays.
int HipApi::DestroyStream(StreamHandle stream) const {
  if (stream_query(stream) != kGpuNotReady) return stream_destroy(stream);
  ClearLastError();
  return kGpuSuccess;
}

// Other devices and NICs write this memory while it is in use. Only a host that waits makes HIP's
// default memory current for all, so that a device may find old bytes in its cache.
int HipApi::Allocate(void** memory, size_t num_bytes) const {
  return malloc(memory, num_bytes, kMallocUncached);
}

int HipApi::Copy(void* to, const void* from, size_t num_bytes, StreamHandle stream) const {
  return memcpy_async(to, from, num_bytes, kCopyDefault, stream);
}

std::pair<const char*, int> HipApi::Values(StreamHandle stream,
                                           std::span<const StreamValue> values) const {
  for (const auto& [kind, address, value] : values) {
    const bool is_wait = kind == StreamValue::Kind::kWait;
    const int result = is_wait ? stream_wait_value(stream, address, value, kWaitAtLeast, kWaitMask)
                               : stream_write_value(stream, address, value, 0);
    if (result == kGpuSuccess) continue;
    return {is_wait ? stream_wait_value.name() : stream_write_value.name(), result};
  }
  return {stream_write_value.name(), kGpuSuccess};
}

std::pair<const char*, int> HipApi::ExportDmaBuf(void* address, size_t num_bytes, int* fd,
                                                 uint64_t* offset) const {
  if (!hsa_export_dmabuf) return {hsa_export_dmabuf.name(), kGpuNotSupported};
  // HSA numbers its results in another way; which one it was helps nobody.
  const bool exported = hsa_export_dmabuf(address, num_bytes, fd, offset) == 0;
  return {hsa_export_dmabuf.name(), exported ? kGpuSuccess : kGpuNotSupported};
}

}  // namespace jaxhet
