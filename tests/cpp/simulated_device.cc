#include "tests/cpp/simulated_device.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>
#include <new>

#include "xla_plugin/base/error.h"
#include "xla_plugin/base/strings.h"

namespace jaxhet::testing {
namespace {

constexpr std::align_val_t kAlignment{64};

// A wait holds for the latest record at its call, as on a GPU, and may outlive the event.
struct SimulatedEvent {
  std::shared_ptr<bool> is_reached = std::make_shared<bool>(true);
};

SimulatedEvent& EventOf(EventHandle handle) { return *reinterpret_cast<SimulatedEvent*>(handle); }

Simulation::Stream& StreamOf(StreamHandle handle) {
  return *reinterpret_cast<Simulation::Stream*>(handle);
}

std::atomic_ref<uint32_t> WordAt(void* address) {
  return std::atomic_ref(*static_cast<uint32_t*>(address));
}

Simulation::Work WorkOf(const StreamValue& value) {
  const auto [kind, address, number] = value;
  return [=] {
    if (kind == StreamValue::Kind::kWait) return WordAt(address).load() >= number;
    WordAt(address).store(number);
    return true;
  };
}

[[noreturn]] void ThrowUnused(std::string_view call) {
  Throw(ErrorCode::kDevice, "a simulated device has no ", call);
}

}  // namespace

void Simulation::Add(Stream& stream, std::vector<Work> work) {
  const std::lock_guard lock(mutex_);
  std::ranges::move(work, std::back_inserter(stream.queue));
}

Simulation::Stream& Simulation::StreamCalled(const std::string& name) {
  const std::lock_guard lock(mutex_);
  const auto found = std::ranges::find(streams_, name, &Stream::name);
  return found == streams_.end() ? streams_.emplace_back(Stream{name, {}}) : *found;
}

bool Simulation::RunOne(Stream& stream) {
  if (stream.queue.empty() || !stream.queue.front()()) return false;
  stream.queue.pop_front();
  return true;
}

bool Simulation::Run() {
  const std::lock_guard lock(mutex_);
  bool moved = true;
  while (moved) {
    moved = false;
    for (Stream& stream : streams_) {
      while (RunOne(stream)) moved = true;
    }
  }
  return std::ranges::all_of(streams_, [](const Stream& stream) { return stream.queue.empty(); });
}

bool Simulation::IsIdle(const Stream& stream) {
  Run();
  const std::lock_guard lock(mutex_);
  return stream.queue.empty();
}

void Simulation::Clear(Stream& stream) {
  const std::lock_guard lock(mutex_);
  stream.queue.clear();
}

void Simulation::RunSome(std::mt19937& random, int count) {
  const std::lock_guard lock(mutex_);
  for (int i = 0; i < count; ++i) RunOne(streams_.at(random() % streams_.size()));
}

SimulatedDevice::SimulatedDevice(Simulation& simulation, std::string name,
                                 std::vector<std::string> streams)
    : Device({.vendor = "simulated",
              .ordinal = 0,
              .name = name,
              .pci_bus_id = {},
              .uuid = std::string(32, '0'),
              .driver_version = 0,
              .stream_values = true,
              .dma_buf = false,
              .gpu_direct_rdma = false}),
      simulation_(simulation),
      name_(std::move(name)),
      stream_names_(std::move(streams)) {}

void SimulatedDevice::Add(StreamHandle stream, std::vector<Simulation::Work> work) {
  simulation_.Add(StreamOf(stream), std::move(work));
}

void SimulatedDevice::DestroyStream(StreamHandle stream) noexcept {
  simulation_.Clear(StreamOf(stream));
}
void SimulatedDevice::DestroyEvent(EventHandle event) noexcept { delete &EventOf(event); }
void SimulatedDevice::Free(void* memory) noexcept { ::operator delete(memory, kAlignment); }
void SimulatedDevice::FreePinned(void* host) noexcept { ::operator delete(host, kAlignment); }

Stream SimulatedDevice::CreateStream(StreamPriority /*priority*/) {
  const std::string name = StrCat(name_, " ", stream_names_.at(num_streams_++));
  return {*this, reinterpret_cast<StreamHandle>(&simulation_.StreamCalled(name))};
}

Event SimulatedDevice::CreateEvent() {
  return {*this, reinterpret_cast<EventHandle>(new SimulatedEvent)};
}

DeviceMemory SimulatedDevice::Allocate(size_t num_bytes) {
  return {*this, ::operator new(num_bytes, kAlignment)};
}

PinnedMemory SimulatedDevice::AllocatePinned(size_t num_bytes) {
  return {*this, ::operator new(num_bytes, kAlignment)};
}

Registration SimulatedDevice::Register(std::span<std::byte> host) { return {*this, host.data()}; }

void SimulatedDevice::Record(EventHandle event, StreamHandle stream) {
  const auto is_reached = EventOf(event).is_reached = std::make_shared<bool>(false);
  Add(stream, {[=] { return *is_reached = true; }});
}

void SimulatedDevice::WaitEvent(StreamHandle stream, EventHandle event) {
  const auto is_reached = EventOf(event).is_reached;
  Add(stream, {[=] { return *is_reached; }});
}

void SimulatedDevice::Copy(StreamHandle stream, void* to, const void* from, size_t num_bytes) {
  Add(stream, {[=] {
        if (num_bytes > 0) std::memmove(to, from, num_bytes);
        return true;
      }});
}

void SimulatedDevice::Fill(StreamHandle stream, void* to, std::byte value, size_t num_bytes) {
  Add(stream, {[=] {
        if (num_bytes > 0) std::memset(to, std::to_integer<int>(value), num_bytes);
        return true;
      }});
}

void SimulatedDevice::Values(StreamHandle stream, std::span<const StreamValue> values) {
  std::vector<Simulation::Work> work;
  std::ranges::transform(values, std::back_inserter(work), WorkOf);
  Add(stream, std::move(work));
}

bool SimulatedDevice::IsIdle(StreamHandle stream) { return simulation_.IsIdle(StreamOf(stream)); }

void SimulatedDevice::Synchronize(StreamHandle /*stream*/) { simulation_.Run(); }

IpcHandleInfo SimulatedDevice::ExportIpc(void* /*address*/) { ThrowUnused("ExportIpc"); }
IpcMemory SimulatedDevice::OpenIpc(const IpcHandleInfo& /*handle*/) { ThrowUnused("OpenIpc"); }
Fd SimulatedDevice::ExportFd(const void* /*address*/) { ThrowUnused("ExportFd"); }
MappedMemory SimulatedDevice::MapFd(const Fd& /*fd*/, size_t /*num_bytes*/) {
  ThrowUnused("MapFd");
}
AddressRange SimulatedDevice::RangeOf(const void* /*address*/) { ThrowUnused("RangeOf"); }
DmaBuf SimulatedDevice::ExportDmaBuf(const void* /*address*/, size_t /*num_bytes*/) {
  ThrowUnused("ExportDmaBuf");
}

}  // namespace jaxhet::testing
