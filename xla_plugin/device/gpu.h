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

#include "xla_plugin/base/error.h"
#include "xla_plugin/base/fd.h"
#include "xla_plugin/base/library.h"
#include "xla_plugin/base/strings.h"
#include "xla_plugin/device/device.h"
#include "xla_plugin/device/failure.h"

namespace jaxhet {

// Code that CUDA's driver and HIP share. An Api holds the entry points under the same names
// with the same signatures, the values of the flags, and the few calls that differ.

// A result that is not success must not stay behind as the thread's "last error": XLA looks at that
// after its own calls. Both of these clear it.

template <typename Api, typename... Parameters, typename... Arguments>
int Try(const Api& api, const Function<int(Parameters...)>& function, Arguments... arguments) {
  const int result = function(arguments...);
  if (result != kGpuSuccess) api.ClearLastError();
  return result;
}

template <typename Api>
void Check(const Api& api, const char* call, std::string_view where, int result) {
  if (result == kGpuSuccess) return;
  api.ClearLastError();
  ThrowFailure(call, where, api.Describe(result));
}

template <typename Api, typename... Parameters, typename... Arguments>
void CallOn(const Api& api, std::string_view where, const Function<int(Parameters...)>& function,
            Arguments... arguments) {
  Check(api, function.name(), where, function(arguments...));
}

// Needs no context.
template <typename Api>
DeviceInfo ReadInfo(const Api& api, int ordinal) {
  const std::string where = StrCat(Api::kVendor, ":", ordinal);
  int device = 0;
  std::array<char, 256> name{};
  std::array<char, 32> pci_bus_id{};
  CallOn(api, where, api.device_get, &device, ordinal);
  CallOn(api, where, api.device_get_name, name.data(), static_cast<int>(name.size()), device);
  CallOn(api, where, api.device_get_pci_bus_id, pci_bus_id.data(),
         static_cast<int>(pci_bus_id.size()), device);
  const auto value_of = [&](int attribute) {  // a driver that is older than the attribute: 0
    int value = 0;
    const int result = Try(api, api.device_get_attribute, &value, attribute, device);
    return result == kGpuSuccess ? value : 0;
  };
  DeviceInfo info{.vendor = Api::kVendor,
                  .ordinal = ordinal,
                  .name = name.data(),
                  .pci_bus_id = pci_bus_id.data(),
                  .driver_version = 0,
                  .stream_values = value_of(Api::kStreamValues) != 0,
                  .dma_buf = value_of(Api::kDmaBufSupported) != 0,
                  .gpu_direct_rdma = value_of(Api::kGpuDirectRdma) != 0};
  info.model = StrCat(info.name, " (compute capability ", value_of(Api::kCapabilityMajor), ".",
                      value_of(Api::kCapabilityMinor), ", ", value_of(Api::kMultiprocessors),
                      " multiprocessors)");
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

// A device, used in its primary context.
template <typename Api>
class Gpu final : public Device {
 public:
  static std::unique_ptr<Device> Open(Vendor::Libraries libraries, int ordinal) {
    const Api api{Library(libraries)};
    CallOn(api, Api::kVendor, api.init, 0U);
    auto gpu = std::make_unique<Gpu>(api, ReadInfo(api, ordinal));
    if (!Api::kWaitsAcquire) gpu->fence_ = gpu->CreateEvent();
    return gpu;
  }

  Gpu(Api api, DeviceInfo info)
      : Device(std::move(info)), api_(std::move(api)), where_(this->info().ToString()) {
    Check(api_, Api::kRetainName, where_, api_.Retain(this->info().ordinal, &context_));
  }
  ~Gpu() override {
    fence_ = {};
    api_.Release(info().ordinal);
  }
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  void DestroyStream(StreamHandle stream) noexcept override {
    Undo([&](const Api& api) {
      return std::pair(api.stream_destroy.name(), api.DestroyStream(stream));
    });
  }
  void DestroyEvent(EventHandle event) noexcept override { Undo(api_.event_destroy, event); }
  void Free(void* memory) noexcept override { Undo(api_.free, memory); }
  void FreePinned(void* host) noexcept override { Undo(api_.host_free, host); }
  void Unregister(void* host) noexcept override { Undo(api_.host_unregister, host); }
  void CloseIpc(void* memory) noexcept override { Undo(api_.ipc_close, memory); }
  void Unmap(AddressRange memory) noexcept override {
    Undo([&](const Api& api) { return api.Unmap(memory); });
  }

  Stream CreateStream(StreamPriority priority) override {
    constexpr int kNormal = 0;  // HIP has a lower one
    int lowest = 0;
    int highest = 0;
    Call(api_.stream_priority_range, &lowest, &highest);
    StreamHandle stream = nullptr;
    Call(api_.stream_create, &stream, Api::kStreamNonBlocking,
         priority == StreamPriority::kHigh ? highest : kNormal);
    return {*this, stream};
  }

  Event CreateEvent() override {
    EventHandle event = nullptr;
    Call(api_.event_create, &event, Api::kEventFlags);
    return {*this, event};
  }

  Memory Allocate(size_t num_bytes) override {
    void* memory = nullptr;
    Run([&](const Api& api) {
      return std::pair(api.malloc.name(), api.Allocate(&memory, num_bytes));
    });
    return {*this, memory};
  }

  PinnedMemory AllocatePinned(size_t num_bytes) override {
    void* host = nullptr;
    Call(api_.host_malloc, &host, num_bytes, Api::kHostMallocPortable | Api::kHostMallocMapped);
    return {*this, host};
  }

  Registration Register(std::span<std::byte> host) override {
    Call(api_.host_register, host.data(), host.size(),
         Api::kHostRegisterPortable | Api::kHostRegisterMapped);
    return {*this, host.data()};
  }

  void* DeviceAddress(void* pinned_host) override {
    void* address = nullptr;
    Call(api_.host_get_device_pointer, &address, pinned_host, 0U);
    return address;
  }

  void Record(EventHandle event, StreamHandle stream) override {
    Call(api_.event_record, event, stream);
  }
  void WaitEvent(StreamHandle stream, EventHandle event) override {
    Call(api_.stream_wait_event, stream, event, 0U);
  }
  void Copy(StreamHandle stream, void* to, const void* from, size_t num_bytes) override {
    if (num_bytes == 0) return;
    Run([&](const Api& api) {
      return std::pair(api.memcpy_async.name(), api.Copy(to, from, num_bytes, stream));
    });
  }
  void Fill(StreamHandle stream, void* to, std::byte value, size_t num_bytes) override {
    if (num_bytes == 0) return;
    Call(api_.memset_async, to, std::to_integer<unsigned char>(value), num_bytes, stream);
  }
  void Values(StreamHandle stream, std::span<const StreamValue> values) override {
    Run([&](const Api& api) { return api.Values(stream, values); });
    if constexpr (!Api::kWaitsAcquire) {
      const bool has_waited =
          std::ranges::count(values, StreamValue::Kind::kWait, &StreamValue::kind) > 0;
      if (has_waited) Record(fence_.get(), stream);
    }
  }

  bool IsIdle(StreamHandle stream) override {
    const Current current(*this);
    const int result = Try(api_, api_.stream_query, stream);
    if (result == kGpuNotReady) return false;
    Check(api_, api_.stream_query.name(), where_, result);
    return true;
  }
  void Synchronize(StreamHandle stream) override { Call(api_.stream_synchronize, stream); }

  IpcHandleInfo ExportIpc(void* address) override {
    IpcHandleInfo handle{};
    Call(api_.ipc_get, &handle, RangeOf(address).base);
    return handle;
  }
  IpcMemory OpenIpc(const IpcHandleInfo& handle) override {
    void* memory = nullptr;
    Call(api_.ipc_open, &memory, handle, Api::kIpcLazyPeerAccess);
    return {*this, memory};
  }

  Fd ExportFd(const void* address) override {
    int fd = -1;
    Run([&](const Api& api) { return api.ExportFd(const_cast<void*>(address), &fd); });
    return Fd(fd);
  }
  MappedMemory MapFd(const Fd& fd, size_t num_bytes) override {
    void* memory = nullptr;
    Run([&](const Api& api) { return api.MapFd(fd.get(), num_bytes, info().ordinal, &memory); });
    return {*this, {.base = memory, .num_bytes = num_bytes}};
  }

  AddressRange RangeOf(const void* address) override {
    AddressRange range{};
    Call(api_.get_address_range, &range.base, &range.num_bytes, const_cast<void*>(address));
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
    Run([&](const Api& api) {
      return api.ExportDmaBuf(reinterpret_cast<void*>(first), size, &fd, &offset);
    });
    return {.fd = Fd(fd), .offset = offset + (begin - first)};
  }

 private:
  // Makes the device current for the calling thread, and what was current before afterwards.
  class Current {
   public:
    explicit Current(const Gpu& gpu) : api_(gpu.api_) {
      Check(api_, Api::kEnterName, gpu.where_, api_.Enter(gpu.context_, &before_));
    }
    ~Current() { api_.Leave(before_); }
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    const Api& api_;
    Api::Context before_{};
  };

  template <typename... Parameters, typename... Arguments>
  void Call(const Function<int(Parameters...)>& function, Arguments... arguments) const {
    const Current current(*this);
    CallOn(api_, where_, function, arguments...);
  }
  // `act` gives the name of a call and its result.
  template <typename Act>
  void Run(Act act) const {
    const Current current(*this);
    const auto [call, result] = act(api_);
    Check(api_, call, where_, result);
  }
  // Releases; a failure is logged.
  template <typename Act>
  void Undo(Act act) const noexcept {
    try {
      Run(act);
    } catch (const Error& error) {
      LogLine(error.what());
    }
  }
  template <typename Handle>
  void Undo(const Function<int(Handle)>& function, Handle handle) const noexcept {
    Undo([&](const Api& /*api*/) { return std::pair(function.name(), function(handle)); });
  }

  const Api api_;
  const std::string where_;
  Api::Context context_{};
  // Recording it is a barrier that empties the device's caches, so that later work of the stream
  // sees what others wrote before the words that it waited for. Nothing waits for the event.
  Event fence_;
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_DEVICE_GPU_H_
