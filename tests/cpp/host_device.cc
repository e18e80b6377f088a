#include "tests/cpp/host_device.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <condition_variable>
#include <cstring>
#include <ctime>
#include <deque>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <new>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "xla_plugin/base/error.h"
#include "xla_plugin/base/thread.h"

namespace jaxhet::testing {
namespace {

constexpr std::align_val_t kAlignment{64};

std::atomic<std::chrono::milliseconds> retirement_delay{};

// See CachedFills.
struct Cache {
  std::atomic<bool> is_used = false;
  std::mutex mutex;
  std::vector<std::function<void()>> fills;

  void Empty() {
    const std::lock_guard lock(mutex);
    for (const auto& fill : std::exchange(fills, {})) fill();
  }
};
Cache cache;

[[noreturn]] void ThrowNoIpc() {
  Throw(ErrorCode::kDevice, "host memory has no IPC handles; use the transports host or socket");
}

DeviceInfo HostInfo() {
  return {.vendor = "host",
          .ordinal = 0,
          .name = "this host's memory",
          .pci_bus_id = {},
          .driver_version = 0,
          .stream_values = true,
          .dma_buf = true,
          .gpu_direct_rdma = true,
          .host_memory = true};
}

constexpr int kSpins = 100;
constexpr timespec kLongestSleep{.tv_sec = 0, .tv_nsec = 1'000'000};  // hosts write words, too

// The word may lie in memory that processes share.
void WaitForWrite(const uint32_t* word, uint32_t seen) {
  syscall(SYS_futex, word, FUTEX_WAIT, seen, &kLongestSleep, nullptr, 0);
}
void Write(uint32_t* word, uint32_t value) {
  std::atomic_ref(*word).store(value);
  syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// A thread does the work.
class ThreadQueue final : public StreamQueue {
 public:
  ThreadQueue() : thread_(StartThread("jaxhet-stream", [this] { Run(); })) {}
  ~ThreadQueue() override {
    stopping_ = true;
    Add({{.run = [] { return true; }}});  // wakes the thread
    thread_.join();
  }
  ThreadQueue(const ThreadQueue&) = delete;
  ThreadQueue& operator=(const ThreadQueue&) = delete;

  void Add(std::vector<StreamWork> work) override {
    const std::lock_guard lock(mutex_);
    num_pending_ += work.size();
    std::ranges::move(work, std::back_inserter(queue_));
    changed_.notify_all();
  }

  bool IsIdle() override {
    const std::lock_guard lock(mutex_);
    return num_pending_ == 0;
  }

  void Synchronize() override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return num_pending_ == 0; });
  }

 private:
  void Run() {
    std::unique_lock lock(mutex_);
    bool given_up = false;  // work could not be done when the queue ended
    while (!stopping_ || !queue_.empty()) {
      changed_.wait(lock, [this] { return !queue_.empty(); });
      const StreamWork work = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      given_up = given_up || !IsDone(work);
      if (const auto delay = retirement_delay.load(); delay.count() > 0) {
        std::this_thread::sleep_for(delay);
      }
      lock.lock();
      --num_pending_;
      changed_.notify_all();
    }
  }

  // Does the work when it can be done; false if the queue ends before.
  bool IsDone(const StreamWork& work) const {
    for (int turn = 0;; ++turn) {
      const uint32_t seen = work.word != nullptr ? std::atomic_ref(*work.word).load() : 0;
      if (work.run()) return true;
      if (stopping_) return false;
      if (turn < kSpins) {
        std::this_thread::yield();
      } else {
        WaitForWrite(work.word, seen);
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<StreamWork> queue_;
  size_t num_pending_ = 0;  // in the queue, or running
  std::atomic<bool> stopping_ = false;
  std::thread thread_;
};

// The latest record, a word that is 1 when its stream has come to it. A wait is for the record that
// is the latest at its call, and may outlive the event.
class HostEvent {
 public:
  std::shared_ptr<uint32_t> Record() {
    const std::lock_guard lock(mutex_);
    return latest_ = std::make_shared<uint32_t>(0);
  }
  std::shared_ptr<uint32_t> latest() {
    const std::lock_guard lock(mutex_);
    return latest_;
  }

 private:
  std::mutex mutex_;
  std::shared_ptr<uint32_t> latest_ = std::make_shared<uint32_t>(1);
};

StreamQueue& StreamOf(StreamHandle handle) { return *reinterpret_cast<StreamQueue*>(handle); }
HostEvent& EventOf(EventHandle handle) { return *reinterpret_cast<HostEvent*>(handle); }

// Adds work that waits for nothing.
void Do(StreamHandle stream, std::function<void()> work) {
  StreamOf(stream).Add({{.run = [work = std::move(work)] {
    work();
    return true;
  }}});
}

StreamWork WorkOf(const StreamValue& value) {
  auto* const word = static_cast<uint32_t*>(value.address);
  const uint32_t number = value.value;
  if (value.kind == StreamValue::Kind::kWait) {
    return {.run = [=] { return std::atomic_ref(*word).load() >= number; }, .word = word};
  }
  return {.run = [=] {
    Write(word, number);
    return true;
  }};
}

// Allocations of all host devices, which are one memory.
struct Allocations {
  struct Allocation {
    size_t num_bytes;
    Fd file;
  };

  std::mutex mutex;
  std::map<std::byte*, Allocation> by_base;
};

Allocations& AllAllocations() {
  static auto* const allocations = new Allocations;
  return *allocations;
}

void* Map(const Fd& file, size_t num_bytes) {
  void* const memory = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (memory == MAP_FAILED) ThrowErrno("mmap");
  return memory;
}

auto Find(const void* address) -> decltype(Allocations::by_base)::const_iterator {
  const auto& allocations = AllAllocations().by_base;
  const auto* const byte = static_cast<const std::byte*>(address);
  const auto next = allocations.upper_bound(const_cast<std::byte*>(byte));
  if (next != allocations.begin()) {
    const auto found = std::prev(next);
    if (byte < found->first + found->second.num_bytes) return found;
  }
  Throw(ErrorCode::kDevice, "host: no allocation of this device holds ", address);
}

thread_local uint64_t num_calls = 0;

class HostDevice final : public Device {
 public:
  explicit HostDevice(std::function<std::unique_ptr<StreamQueue>()> make_queue)
      : Device(HostInfo()), make_queue_(std::move(make_queue)) {}

  void DestroyStream(StreamHandle stream) noexcept override {
    ++num_calls;
    delete &StreamOf(stream);
  }
  void DestroyEvent(EventHandle event) noexcept override {
    ++num_calls;
    delete &EventOf(event);
  }
  void Free(void* memory) noexcept override {
    ++num_calls;
    Allocations& all = AllAllocations();
    const std::lock_guard lock(all.mutex);
    const auto allocation = all.by_base.extract(static_cast<std::byte*>(memory));
    munmap(memory, allocation.mapped().num_bytes);
  }
  void FreePinned(void* host) noexcept override {
    ++num_calls;
    ::operator delete(host, kAlignment);
  }
  void Unregister(void* /*host*/) noexcept override { ++num_calls; }
  void CloseIpc(void* /*memory*/) noexcept override {}
  void Unmap(AddressRange memory) noexcept override { munmap(memory.base, memory.num_bytes); }

  Stream CreateStream(StreamPriority /*priority*/) override {
    ++num_calls;
    return {*this, reinterpret_cast<StreamHandle>(make_queue_().release())};
  }
  Event CreateEvent() override {
    ++num_calls;
    return {*this, reinterpret_cast<EventHandle>(new HostEvent)};
  }
  // Allocates a file: memory is exported by its descriptor.
  Memory Allocate(size_t num_bytes) override {
    ++num_calls;
    Fd file(memfd_create("jaxhet-device", MFD_CLOEXEC));
    if (!file || ftruncate(file.get(), static_cast<off_t>(num_bytes)) != 0) ThrowErrno("memfd");
    void* const memory = Map(file, num_bytes);
    Allocations& all = AllAllocations();
    const std::lock_guard lock(all.mutex);
    all.by_base[static_cast<std::byte*>(memory)] = {num_bytes, std::move(file)};
    return {*this, memory};
  }
  PinnedMemory AllocatePinned(size_t num_bytes) override {
    ++num_calls;
    return {*this, ::operator new(num_bytes, kAlignment)};
  }
  Registration Register(std::span<std::byte> host) override {
    ++num_calls;
    return {*this, host.data()};
  }
  void* DeviceAddress(void* pinned_host) override {
    ++num_calls;
    return pinned_host;
  }

  void Record(EventHandle event, StreamHandle stream) override {
    ++num_calls;
    Do(stream, [record = EventOf(event).Record()] { Write(record.get(), 1); });
  }
  void WaitEvent(StreamHandle stream, EventHandle event) override {
    ++num_calls;
    const auto record = EventOf(event).latest();
    const auto run = [record] { return std::atomic_ref(*record).load() == 1; };
    StreamOf(stream).Add({{.run = run, .word = record.get()}});
  }
  void Copy(StreamHandle stream, void* to, const void* from, size_t num_bytes) override {
    ++num_calls;
    if (num_bytes == 0) return;
    Do(stream, [=] { std::memmove(to, from, num_bytes); });
  }
  void Fill(StreamHandle stream, void* to, std::byte value, size_t num_bytes) override {
    ++num_calls;
    if (num_bytes == 0) return;
    Do(stream, [=] {
      const auto fill = [=] { std::memset(to, std::to_integer<int>(value), num_bytes); };
      if (!cache.is_used) return fill();
      const std::lock_guard lock(cache.mutex);
      cache.fills.emplace_back(fill);
    });
  }
  void Values(StreamHandle stream, std::span<const StreamValue> values) override {
    num_calls += values.size();
    std::vector<StreamWork> work;
    std::ranges::transform(values, std::back_inserter(work), WorkOf);
    StreamOf(stream).Add(std::move(work));
  }

  bool IsIdle(StreamHandle stream) override {
    ++num_calls;
    return StreamOf(stream).IsIdle();
  }
  void Synchronize(StreamHandle stream) override {
    ++num_calls;
    StreamOf(stream).Synchronize();
    cache.Empty();
  }

  IpcHandleInfo ExportIpc(void* /*address*/) override { ThrowNoIpc(); }
  IpcMemory OpenIpc(const IpcHandleInfo& /*handle*/) override { ThrowNoIpc(); }
  Fd ExportFd(const void* address) override { return ExportDmaBuf(address, 0).fd; }
  MappedMemory MapFd(const Fd& fd, size_t num_bytes) override {
    ++num_calls;
    struct stat status{};
    if (fstat(fd.get(), &status) != 0) ThrowErrno("fstat");
    if (num_bytes == 0 || std::cmp_less(status.st_size, num_bytes)) {
      Throw(ErrorCode::kDevice, "the peer's memory has ", status.st_size, " bytes, not ",
            num_bytes);
    }
    return {*this, {.base = Map(fd, num_bytes), .num_bytes = num_bytes}};
  }
  AddressRange RangeOf(const void* address) override {
    ++num_calls;
    const std::lock_guard lock(AllAllocations().mutex);
    const auto& [base, allocation] = *Find(address);
    return {.base = base, .num_bytes = allocation.num_bytes};
  }
  DmaBuf ExportDmaBuf(const void* address, size_t /*num_bytes*/) override {
    ++num_calls;
    const std::lock_guard lock(AllAllocations().mutex);
    const auto& [base, allocation] = *Find(address);
    Fd file(fcntl(allocation.file.get(), F_DUPFD_CLOEXEC, 0));
    if (!file) ThrowErrno("fcntl(F_DUPFD_CLOEXEC)");
    return {.fd = std::move(file),
            .offset = static_cast<size_t>(static_cast<const std::byte*>(address) - base)};
  }

 private:
  std::function<std::unique_ptr<StreamQueue>()> make_queue_;
};

std::vector<DeviceInfo> List(Vendor::Libraries /*libraries*/) { return {HostInfo()}; }

std::unique_ptr<Device> Open(Vendor::Libraries /*libraries*/, int ordinal) {
  if (ordinal != 0) Throw(ErrorCode::kUsage, "there is one host device, not ", ordinal + 1);
  return OpenHostDevice();
}

}  // namespace

const Vendor& HostVendor() {
  static constexpr Vendor kVendor = {"host", {}, &List, &Open};
  return kVendor;
}

const Vendor& TestVendorOf(std::string_view name) {
  return name == HostVendor().name ? HostVendor() : VendorOf(name);
}

std::unique_ptr<Device> OpenHostDevice() {
  return OpenHostDevice([] { return std::make_unique<ThreadQueue>(); });
}

std::unique_ptr<Device> OpenHostDevice(std::function<std::unique_ptr<StreamQueue>()> make_queue) {
  return std::make_unique<HostDevice>(std::move(make_queue));
}

uint64_t HostDeviceCalls() { return num_calls; }

CachedFills::CachedFills() { cache.is_used = true; }
CachedFills::~CachedFills() {
  cache.is_used = false;
  cache.Empty();
}

LateRetirement::LateRetirement(std::chrono::milliseconds delay) { retirement_delay = delay; }
LateRetirement::~LateRetirement() { retirement_delay = std::chrono::milliseconds(0); }

}  // namespace jaxhet::testing
