#ifndef XLA_PLUGIN_DEVICE_DEVICE_H_
#define XLA_PLUGIN_DEVICE_DEVICE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "xla_plugin/base/fd.h"

namespace jaxhet {

class Device;

// The vendor's own handles (CUstream and hipStream_t, CUevent and hipEvent_t), so that XLA's
// streams can be used as well as ours.
using StreamHandle = struct StreamTag*;
using EventHandle = struct EventTag*;

enum class StreamPriority { kNormal, kHigh };

struct DeviceInfo {
  std::string_view vendor;
  int ordinal;  // the vendor's number in this process
  std::string name;
  std::string pci_bus_id;
  int driver_version;    // in the vendor's form: 13000, 70051831
  bool stream_values;    // WriteValue() and WaitValue() work
  bool dma_buf;          // ExportDmaBuf() works; false also if the driver is too old to say so
  bool gpu_direct_rdma;  // NICs can register the device's memory
  // Peers on this host can pull out of its memory, which is the host's.
  bool host_memory = false;
  // Devices with equal ones can run the same executable equally well. A plugin of JAX may give all
  // devices of a process the name of the first.
  std::string model = {};  // NOLINT(readability-redundant-member-init): GCC warns without it

  std::string ToString() const;  // "cuda:0 (NVIDIA H200, 0000:18:00.0)"
};

// A whole allocation.
struct AddressRange {
  void* base;
  size_t num_bytes;

  // None if some of `bytes` lies elsewhere.
  std::optional<uint64_t> OffsetOf(std::span<const std::byte> bytes) const;
};

// Names an allocation of this host in other processes. It travels between processes.
struct IpcHandleInfo {
  std::array<std::byte, 64> bytes;
};

// Operation of a stream on a word of memory, whose address is aligned to 4. Values are below 2^31:
// CUDA compares cyclically, HIP does not.
struct StreamValue {
  enum class Kind {
    kWrite,  // all earlier work of the stream is visible to whoever sees the value
    kWait,   // until the word is at least `value`
  };

  Kind kind;
  void* address;
  uint32_t value;
};

// Memory starts at `offset` of what `fd` names.
struct DmaBuf {
  Fd fd;
  size_t offset;
};

// Owner of a device's object, which it releases when it is destroyed; the device must outlive it.
// The program makes sure that nothing on a stream uses it any more.
template <typename Handle, void (Device::*kRelease)(Handle) noexcept>
class Owned {
 public:
  Owned() = default;
  Owned(Device& device, Handle handle) : device_(&device), handle_(handle) {}
  Owned(Owned&& other) noexcept
      : device_(std::exchange(other.device_, nullptr)), handle_(other.handle_) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Owned() {
    if (device_ != nullptr) (device_->*kRelease)(handle_);
  }

  Handle get() const { return handle_; }

 private:
  Device* device_ = nullptr;
  Handle handle_{};
};

// One device of a vendor. Any thread may call it at any time; what a thread has current of the
// vendor's runtime is as before when a call returns. Failures are thrown as DeviceError, with the
// name of the vendor's call. Addresses are the device's, which are the host's for pinned memory
// only if DeviceAddress() says so.
class Device {
 public:
  virtual ~Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const DeviceInfo& info() const { return info_; }

  // Release of the device's objects. Only Owned calls these; they log failures. Destroying a
  // stream or an event does not wait for work. Freeing memory may wait for all work of the device.
  virtual void DestroyStream(StreamHandle stream) noexcept = 0;
  virtual void DestroyEvent(EventHandle event) noexcept = 0;
  virtual void Free(void* memory) noexcept = 0;
  virtual void FreePinned(void* host) noexcept = 0;
  virtual void Unregister(void* host) noexcept = 0;
  virtual void CloseIpc(void* memory) noexcept = 0;
  virtual void Unmap(AddressRange memory) noexcept = 0;

  using Stream = Owned<StreamHandle, &Device::DestroyStream>;
  using Event = Owned<EventHandle, &Device::DestroyEvent>;
  using Memory = Owned<void*, &Device::Free>;
  using PinnedMemory = Owned<void*, &Device::FreePinned>;
  using Registration = Owned<void*, &Device::Unregister>;
  using IpcMemory = Owned<void*, &Device::CloseIpc>;
  using MappedMemory = Owned<AddressRange, &Device::Unmap>;

  // The stream and the default stream do not wait for each other.
  virtual Stream CreateStream(StreamPriority priority) = 0;
  // Without time stamps.
  virtual Event CreateEvent() = 0;
  // Peers and NICs may write it while this device uses it.
  virtual Memory Allocate(size_t num_bytes) = 0;
  // Host memory that every device of the vendor sees.
  virtual PinnedMemory AllocatePinned(size_t num_bytes) = 0;
  // Pins whole pages of host memory, which may be shared by processes: all devices see them then.
  virtual Registration Register(std::span<std::byte> host) = 0;
  virtual void* DeviceAddress(void* pinned_host) = 0;

  // In the order of a stream, without waiting for it. Whoever sees that the event is over also sees
  // all earlier work of the stream.
  virtual void Record(EventHandle event, StreamHandle stream) = 0;
  virtual void WaitEvent(StreamHandle stream, EventHandle event) = 0;
  // Between any two of: this device's memory, a peer's, pinned memory.
  virtual void Copy(StreamHandle stream, void* to, const void* from, size_t num_bytes) = 0;
  virtual void Fill(StreamHandle stream, void* to, std::byte value, size_t num_bytes) = 0;
  // Operations on words, one after the other. Later work of the stream sees what was visible when
  // the words that it waited for were written.
  virtual void Values(StreamHandle stream, std::span<const StreamValue> values) = 0;
  // Values() for one word.
  void WriteValue(StreamHandle stream, void* address, uint32_t value) {
    Values(stream, {{{StreamValue::Kind::kWrite, address, value}}});
  }
  void WaitValue(StreamHandle stream, void* address, uint32_t value) {
    Values(stream, {{{StreamValue::Kind::kWait, address, value}}});
  }

  // False while work is left. Throws if the work failed.
  virtual bool IsIdle(StreamHandle stream) = 0;
  // Blocks the calling thread, without a deadline.
  virtual void Synchronize(StreamHandle stream) = 0;

  // Memory that other processes and NICs use.
  //
  // Handle of the allocation that holds `address`. Only for memory of Allocate(): XLA's memory is
  // from another interface of the driver.
  virtual IpcHandleInfo ExportIpc(void* address) = 0;
  // In another process than the one that exported: the base of that allocation.
  virtual IpcMemory OpenIpc(const IpcHandleInfo& handle) = 0;
  // The same for memory that has no IPC handle, but was made to be shared, as XLA's arena on CUDA.
  virtual Fd ExportFd(const void* address) = 0;
  virtual MappedMemory MapFd(const Fd& fd, size_t num_bytes) = 0;
  virtual AddressRange RangeOf(const void* address) = 0;
  // For an RDMA NIC. Fails on ranges that don't fill whole pages of an allocation.
  virtual DmaBuf ExportDmaBuf(const void* address, size_t num_bytes) = 0;

 protected:
  explicit Device(DeviceInfo info) : info_(std::move(info)) {}

 private:
  DeviceInfo info_;
};

using Stream = Device::Stream;
using Event = Device::Event;
using DeviceMemory = Device::Memory;
using PinnedMemory = Device::PinnedMemory;
using Registration = Device::Registration;
using IpcMemory = Device::IpcMemory;
using MappedMemory = Device::MappedMemory;

// Whether memory is what it seems to be: bytes that the device itself writes or reads there. Both
// functions block.
void WriteProof(Device& device, void* to, std::span<const std::byte> proof);
bool HasProof(Device& device, const void* from, std::span<const std::byte> proof);

// A kind of device. Both functions load the first of `libraries` and throw DeviceError with the
// reason if that, or its driver, can't be used here.
struct Vendor {
  using Libraries = std::span<const char* const>;

  std::string_view name;
  Libraries libraries;  // best first
  std::vector<DeviceInfo> (*list)(Libraries libraries);
  std::unique_ptr<Device> (*open)(Libraries libraries, int ordinal);
};

// All vendors, in the order in which they are tried.
std::span<const Vendor> Vendors();
// Throws UsageError if there is no such vendor.
const Vendor& VendorOf(std::string_view name);

}  // namespace jaxhet

#endif  // XLA_PLUGIN_DEVICE_DEVICE_H_
