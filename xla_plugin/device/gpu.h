#ifndef XLA_PLUGIN_DEVICE_GPU_H_
#define XLA_PLUGIN_DEVICE_GPU_H_

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "xla_plugin/base/fd.h"
#include "xla_plugin/base/strings.h"
#include "xla_plugin/device/device.h"
#include "xla_plugin/device/failure.h"
#include "xla_plugin/device/gpu_context.h"

namespace jaxhet {

// Needs no context.
template <typename Api>
DeviceInfo ReadInfo(const Api& api, int ordinal) {
  const std::string where = StrCat(Api::kVendor, ":", ordinal);
  int device = 0;
  std::array<char, 256> name{};
  std::array<char, 32> pci_bus_id{};
  std::array<unsigned char, 16> uuid{};
  CallOn(api, where, api.device_get, &device, ordinal);
  CallOn(api, where, api.device_get_name, name.data(), static_cast<int>(name.size()), device);
  CallOn(api, where, api.device_get_pci_bus_id, pci_bus_id.data(),
         static_cast<int>(pci_bus_id.size()), device);
  CallOn(api, where, api.device_get_uuid, uuid.data(), device);
  const auto value_of = [&](int attribute) {  // a driver that is older than the attribute: 0
    int value = 0;
    const int result = Try(api, api.device_get_attribute, &value, attribute, device);
    return result == kGpuSuccess ? value : 0;
  };
  DeviceInfo info{.vendor = Api::kVendor,
                  .ordinal = ordinal,
                  .name = name.data(),
                  .pci_bus_id = pci_bus_id.data(),
                  .uuid = {},
                  .driver_version = 0,
                  .stream_values = value_of(Api::kStreamValues) != 0,
                  .dma_buf = value_of(Api::kDmaBufSupported) != 0,
                  .gpu_direct_rdma = value_of(Api::kGpuDirectRdma) != 0};
  info.model = StrCat(info.name, " (compute capability ", value_of(Api::kCapabilityMajor), ".",
                      value_of(Api::kCapabilityMinor), ", ", value_of(Api::kMultiprocessors),
                      " multiprocessors)");
  for (const unsigned char byte : uuid) {
    constexpr std::string_view kDigits = "0123456789abcdef";
    info.uuid += {kDigits[byte >> 4], kDigits[byte & 15]};
  }
  CallOn(api, where, api.get_version, &info.driver_version);
  return info;
}

template <typename Api>
std::vector<DeviceInfo> ListGpus(Vendor::Libraries libraries) {
  const Api api{Library(libraries)};
  int count = 0;
  CallOn(api, Api::kVendor, api.init, 0U);
  CallOn(api, Api::kVendor, api.get_device_count, &count);
  std::vector<DeviceInfo> devices;
  for (int ordinal = 0; ordinal < count; ++ordinal) devices.push_back(ReadInfo(api, ordinal));
  return devices;
}

template <typename Api>
class Gpu final : public Device {
 public:
  static std::unique_ptr<Device> Open(Vendor::Libraries libraries, int ordinal) {
    const Api api{Library(libraries)};
    CallOn(api, Api::kVendor, api.init, 0U);
    return std::make_unique<Gpu>(api, ReadInfo(api, ordinal));
  }

  Gpu(Api api, DeviceInfo info) : Device(std::move(info)), context_(std::move(api), this->info()) {}

  void DestroyStream(StreamHandle stream) noexcept override {
    context_.RunUndo([&](const Api& api) {
      return std::pair(api.stream_destroy.name(), api.DestroyStream(stream));
    });
  }
  void DestroyEvent(EventHandle event) noexcept override {
    context_.Undo(api().event_destroy, event);
  }
  void Free(void* memory) noexcept override { context_.Undo(api().free, memory); }
  void FreePinned(void* host) noexcept override { context_.Undo(api().host_free, host); }
  void Unregister(void* host) noexcept override { context_.Undo(api().host_unregister, host); }
  void CloseIpc(void* memory) noexcept override { context_.Undo(api().ipc_close, memory); }
  void Unmap(AddressRange memory) noexcept override {
    context_.RunUndo([&](const Api& api) { return api.Unmap(memory); });
  }

  Stream CreateStream(StreamPriority priority) override {
    constexpr int kNormal = 0;  // HIP has a lower one
    int lowest = 0;
    int highest = 0;
    context_.Call(api().stream_priority_range, &lowest, &highest);
    StreamHandle stream = nullptr;
    context_.Call(api().stream_create, &stream, Api::kStreamNonBlocking,
                  priority == StreamPriority::kHigh ? highest : kNormal);
    return {*this, stream};
  }

  Event CreateEvent() override {
    EventHandle event = nullptr;
    context_.Call(api().event_create, &event, Api::kEventFlags);
    return {*this, event};
  }

  Memory Allocate(size_t num_bytes) override {
    void* memory = nullptr;
    context_.Run([&](const Api& api) {
      return std::pair(api.malloc.name(), api.Allocate(&memory, num_bytes));
    });
    return {*this, memory};
  }

  PinnedMemory AllocatePinned(size_t num_bytes) override {
    void* host = nullptr;
    context_.Call(api().host_malloc, &host, num_bytes,
                  Api::kHostMallocPortable | Api::kHostMallocMapped);
    return {*this, host};
  }

  Registration Register(std::span<std::byte> host) override {
    context_.Call(api().host_register, host.data(), host.size(),
                  Api::kHostRegisterPortable | Api::kHostRegisterMapped);
    return {*this, host.data()};
  }

  void* DeviceAddress(void* pinned_host) override {
    void* address = nullptr;
    context_.Call(api().host_get_device_pointer, &address, pinned_host, 0U);
    return address;
  }

  void Record(EventHandle event, StreamHandle stream) override {
    context_.Call(api().event_record, event, stream);
  }
  void WaitEvent(StreamHandle stream, EventHandle event) override {
    context_.Call(api().stream_wait_event, stream, event, 0U);
  }
  void Copy(StreamHandle stream, void* to, const void* from, size_t num_bytes) override {
    if (num_bytes == 0) return;
    context_.Run([&](const Api& api) {
      return std::pair(api.memcpy_async.name(), api.Copy(to, from, num_bytes, stream));
    });
  }
  void Fill(StreamHandle stream, void* to, std::byte value, size_t num_bytes) override {
    if (num_bytes == 0) return;
    context_.Call(api().memset_async, to, std::to_integer<unsigned char>(value), num_bytes, stream);
  }
  void Values(StreamHandle stream, std::span<const StreamValue> values) override {
    context_.Run([&](const Api& api) { return api.Values(stream, values); });
    if constexpr (!Api::kWaitsAcquire) {
      const bool has_waited =
          std::ranges::count(values, StreamValue::Kind::kWait, &StreamValue::kind) > 0;
      if (has_waited) Record(fence_.get(), stream);
    }
  }

  bool IsIdle(StreamHandle stream) override { return context_.IsIdle(stream); }
  void Synchronize(StreamHandle stream) override {
    context_.Call(api().stream_synchronize, stream);
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

  const GpuContext<Api> context_;
  // Recording it is a barrier that empties the device's caches, so that later work of the stream
  // sees what others wrote before the words that it waited for. Nothing waits for the event.
  Event fence_ = Api::kWaitsAcquire ? Event{} : CreateEvent();
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_DEVICE_GPU_H_
