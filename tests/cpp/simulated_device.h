#ifndef TESTS_CPP_SIMULATED_DEVICE_H_
#define TESTS_CPP_SIMULATED_DEVICE_H_

#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "xla_plugin/device/device.h"

namespace jaxhet::testing {

// Devices whose streams run only when the test says so.
class Simulation {
 public:
  // Work of a stream; false if it can't be done yet.
  using Work = std::function<bool()>;
  struct Stream {
    std::string name;
    std::deque<Work> queue;
  };

  void Add(Stream& stream, std::vector<Work> work);

  // A new one, if none has this name yet.
  Stream& StreamCalled(const std::string& name);
  // Runs the streams until none can continue; true if no work is left.
  bool Run();
  bool IsIdle(const Stream& stream);
  // Drops the work that is left.
  void Clear(Stream& stream);
  // Runs up to `count` pieces of work, of streams chosen at random.
  void RunSome(std::mt19937& random, int count);

 private:
  static bool RunOne(Stream& stream);

  std::mutex mutex_;  // guards the streams
  std::deque<Stream> streams_;
};

// A device of the simulation. Streams get the names in `streams` in the order of their creation.
// Two streams of one name share a queue, as streams of a driver may share a hardware queue.
class SimulatedDevice final : public Device {
 public:
  SimulatedDevice(Simulation& simulation, std::string name, std::vector<std::string> streams);

  void DestroyStream(StreamHandle stream) noexcept override;
  void DestroyEvent(EventHandle event) noexcept override;
  void Free(void* memory) noexcept override;
  void FreePinned(void* host) noexcept override;
  void Unregister(void* /*host*/) noexcept override {}

  Stream CreateStream(StreamPriority priority) override;
  Event CreateEvent() override;
  Memory Allocate(size_t num_bytes) override;
  PinnedMemory AllocatePinned(size_t num_bytes) override;
  Registration Register(std::span<std::byte> host) override;
  void* DeviceAddress(void* pinned_host) override { return pinned_host; }

  void Record(EventHandle event, StreamHandle stream) override;
  void WaitEvent(StreamHandle stream, EventHandle event) override;
  void Copy(StreamHandle stream, void* to, const void* from, size_t num_bytes) override;
  void Fill(StreamHandle stream, void* to, std::byte value, size_t num_bytes) override;
  void Values(StreamHandle stream, std::span<const StreamValue> values) override;

  bool IsIdle(StreamHandle stream) override;
  void Synchronize(StreamHandle stream) override;

  void CloseIpc(void* /*memory*/) noexcept override {}
  void Unmap(AddressRange /*memory*/) noexcept override {}
  IpcHandleInfo ExportIpc(void* address) override;
  IpcMemory OpenIpc(const IpcHandleInfo& handle) override;
  Fd ExportFd(const void* address) override;
  MappedMemory MapFd(const Fd& fd, size_t num_bytes) override;
  AddressRange RangeOf(const void* address) override;
  DmaBuf ExportDmaBuf(const void* address, size_t num_bytes) override;

 private:
  void Add(StreamHandle stream, std::vector<Simulation::Work> work);

  Simulation& simulation_;
  std::string name_;
  std::vector<std::string> stream_names_;
  size_t num_streams_ = 0;
};

}  // namespace jaxhet::testing

#endif  // TESTS_CPP_SIMULATED_DEVICE_H_
