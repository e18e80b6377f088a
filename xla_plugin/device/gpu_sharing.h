#ifndef XLA_PLUGIN_DEVICE_GPU_SHARING_H_
#define XLA_PLUGIN_DEVICE_GPU_SHARING_H_

#include <unistd.h>

#include <cstddef>
#include <cstdint>

#include "xla_plugin/base/fd.h"
#include "xla_plugin/device/device.h"
#include "xla_plugin/device/gpu_context.h"

namespace jaxhet {

template <typename Api>
class GpuSharing final : public MemorySharing {
 public:
  // `context` must outlive this.
  explicit GpuSharing(const GpuContext<Api>& context) : context_(context) {}

  void CloseIpc(void* memory) noexcept override { context_.Undo(api().ipc_close, memory); }
  void Unmap(AddressRange memory) noexcept override {
    context_.RunUndo([&](const Api& api) { return api.Unmap(memory); });
  }

  IpcHandleInfo ExportIpc(void* address) override {
    IpcHandleInfo handle{};
    context_.Call(api().ipc_get, &handle, RangeOf(address).base);
    return handle;
  }
  IpcMemory OpenIpc(const IpcHandleInfo& handle) override {
    void* memory = nullptr;
    context_.Call(api().ipc_open, &memory, handle, Api::kIpcLazyPeerAccess);
    return {*this, memory};
  }

  Fd ExportFd(const void* address) override {
    int fd = -1;
    context_.Run([&](const Api& api) { return api.ExportFd(const_cast<void*>(address), &fd); });
    return Fd(fd);
  }
  MappedMemory MapFd(const Fd& fd, size_t num_bytes) override {
    void* memory = nullptr;
    context_.Run([&](const Api& api) {
      return api.MapFd(fd.get(), num_bytes, context_.ordinal(), &memory);
    });
    return {*this, {.base = memory, .num_bytes = num_bytes}};
  }

  AddressRange RangeOf(const void* address) override {
    AddressRange range{};
    context_.Call(api().get_address_range, &range.base, &range.num_bytes,
                  const_cast<void*>(address));
    return range;
  }

  DmaBuf ExportDmaBuf(const void* address, size_t num_bytes) override {
    // The drivers take whole pages of the host only.
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto begin = reinterpret_cast<uintptr_t>(address);
    const uintptr_t first = begin & ~(page - 1);
    const size_t size = (begin + num_bytes - first + page - 1) & ~(page - 1);
    int fd = -1;
    uint64_t offset = 0;
    context_.Run([&](const Api& api) {
      return api.ExportDmaBuf(reinterpret_cast<void*>(first), size, &fd, &offset);
    });
    return {.fd = Fd(fd), .offset = offset + (begin - first)};
  }

 private:
  const Api& api() const { return context_.api(); }

  const GpuContext<Api>& context_;
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_DEVICE_GPU_SHARING_H_
