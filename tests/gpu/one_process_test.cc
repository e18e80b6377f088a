#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <span>
#include <thread>
#include <vector>

#include "tests/gpu/device_testing.h"

// The tests of one process.
namespace jaxhet::testing {
namespace {

void TestInfo(const Setup& setup) {
  for (const DeviceInfo& info : setup.List()) {
    std::printf("  %s version %d: stream values %d, dma-buf %d, GPUDirect RDMA %d\n",
                info.ToString().c_str(), info.driver_version, info.stream_values ? 1 : 0,
                info.dma_buf ? 1 : 0, info.gpu_direct_rdma ? 1 : 0);
    Expect(info.pci_bus_id.size() >= 12, "PCI bus id");
    Expect(info.stream_values, "stream values");
  }
}

void TestCopies(const Setup& setup) {
  const auto device = setup.Open();
  const Stream stream = device->CreateStream(StreamPriority::kHigh);
  for (const size_t num_bytes :
       {size_t{0}, size_t{1}, size_t{7}, size_t{4097}, size_t{3 << 20} - 1}) {
    const DeviceMemory a = device->Allocate(num_bytes + 1);
    const DeviceMemory b = device->Allocate(num_bytes + 1);
    const PinnedMemory from = device->AllocatePinned(num_bytes + 1);
    const PinnedMemory to = device->AllocatePinned(num_bytes + 1);
    Fill(from.get(), num_bytes + 1, 3);
    std::memset(to.get(), 0, num_bytes + 1);
    device->Copy(stream.get(), a.get(), from.get(), num_bytes + 1);
    device->Copy(stream.get(), b.get(), a.get(), num_bytes + 1);
    device->Copy(stream.get(), to.get(), b.get(), num_bytes);
    device->Synchronize(stream.get());
    Expect(device->IsIdle(stream.get()), "an idle stream");
    Expect(IsFilled(to.get(), num_bytes, 3), "the copy");
    Expect(Bytes(to.get())[num_bytes] == std::byte{0}, "the byte after the copy");
    device->Fill(stream.get(), b.get(), std::byte{0xFF}, num_bytes);
    device->Copy(stream.get(), to.get(), b.get(), num_bytes);
    device->Synchronize(stream.get());
    Expect(std::all_of(Bytes(to.get()), Bytes(to.get()) + num_bytes,
                       [](std::byte byte) { return byte == std::byte{0xFF}; }),
           "the fill");
  }
}

void TestPeerCopy(const Setup& setup) {
  if (setup.List().size() < 2) throw Skip("one device only");
  constexpr size_t kNumBytes = (1 << 20) + 1;
  const auto first = setup.Open(0);
  const auto second = setup.Open(1);
  const Stream stream = second->CreateStream(StreamPriority::kNormal);
  const DeviceMemory a = first->Allocate(kNumBytes);
  const DeviceMemory b = second->Allocate(kNumBytes);
  const PinnedMemory host = first->AllocatePinned(2 * kNumBytes);
  Fill(host.get(), kNumBytes, 9);
  second->Copy(stream.get(), a.get(), host.get(), kNumBytes);
  second->Copy(stream.get(), b.get(), a.get(), kNumBytes);
  second->Copy(stream.get(), Bytes(host.get()) + kNumBytes, b.get(), kNumBytes);
  second->Synchronize(stream.get());
  Expect(IsFilled(Bytes(host.get()) + kNumBytes, kNumBytes, 9), "the copy");
}

// A word that starts as 0, seen by host and device.
class Word {
 public:
  explicit Word(Device& device) : memory_(device.AllocatePinned(sizeof(uint32_t))) {
    std::memset(memory_.get(), 0, sizeof(uint32_t));
    address_ = device.DeviceAddress(memory_.get());
  }
  void* address() const { return address_; }
  void Set(uint32_t value) const { word().store(value); }
  uint32_t Get() const { return word().load(); }

 private:
  std::atomic_ref<uint32_t> word() const {
    return std::atomic_ref(*static_cast<uint32_t*>(memory_.get()));
  }

  PinnedMemory memory_;
  void* address_;
};

void TestEvents(const Setup& setup) {
  const auto device = setup.Open();
  const Stream a = device->CreateStream(StreamPriority::kNormal);
  const Stream b = device->CreateStream(StreamPriority::kHigh);
  const Event event = device->CreateEvent();
  const Word gate(*device);
  device->WaitValue(a.get(), gate.address(), 1);
  device->Record(event.get(), a.get());
  device->WaitEvent(b.get(), event.get());
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  Expect(!device->IsIdle(b.get()), "waiting");
  gate.Set(1);
  device->Synchronize(b.get());
  Expect(device->IsIdle(b.get()), "done");
}

void TestValues(const Setup& setup) {
  constexpr uint32_t kTurns = 200;
  const auto device = setup.Open();
  const Stream a = device->CreateStream(StreamPriority::kNormal);
  const Stream b = device->CreateStream(StreamPriority::kNormal);
  const Word ping(*device);
  const Word pong(*device);
  const auto begin = std::chrono::steady_clock::now();
  for (uint32_t turn = 1; turn <= kTurns; ++turn) {
    device->WriteValue(a.get(), ping.address(), turn);
    device->WaitValue(b.get(), ping.address(), turn);
    device->WriteValue(b.get(), pong.address(), turn);
    device->WaitValue(a.get(), pong.address(), turn);
  }
  device->Synchronize(a.get());
  device->Synchronize(b.get());
  PrintTurns(kTurns, begin);
  Expect(ping.Get() == kTurns && pong.Get() == kTurns, "the last values");
}

void TestPinned(const Setup& setup) {
  constexpr size_t kNumBytes = 1 << 16;
  const auto device = setup.Open();
  const Stream stream = device->CreateStream(StreamPriority::kNormal);
  void* const pages =
      mmap(nullptr, kNumBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  Expect(pages != MAP_FAILED, "mmap");
  {
    const std::span host(Bytes(pages), kNumBytes);
    const Registration registration = device->Register(host);
    const DeviceMemory memory = device->Allocate(kNumBytes);
    Fill(pages, kNumBytes / 2, 5);
    void* const seen = device->DeviceAddress(pages);
    device->Copy(stream.get(), memory.get(), seen, kNumBytes / 2);
    device->Copy(stream.get(), Bytes(seen) + kNumBytes / 2, memory.get(), kNumBytes / 2);
    device->Synchronize(stream.get());
    Expect(IsFilled(Bytes(pages) + kNumBytes / 2, kNumBytes / 2, 5), "the copy");
    ExpectWords([&] { device->Register(host); }, "(712)");
  }
  const Registration again = device->Register(std::span(Bytes(pages), kNumBytes));
}

void TestRange(const Setup& setup) {
  constexpr size_t kNumBytes = 3 << 20;
  const auto device = setup.Open();
  const DeviceMemory memory = device->Allocate(kNumBytes);
  const AddressRange range = device->RangeOf(Bytes(memory.get()) + 12345);
  Expect(range.base == memory.get() && range.num_bytes >= kNumBytes, "the range");
}

void TestDmaBuf(const Setup& setup) {
  const auto device = setup.Open();
  if (!device->info().dma_buf) throw Skip("the driver says that it exports no dma-buf");
  constexpr size_t kNumBytes = 4 << 20;
  const DeviceMemory memory = device->Allocate(kNumBytes);
  const DmaBuf whole = device->ExportDmaBuf(memory.get(), kNumBytes);
  Expect(fcntl(whole.fd.get(), F_GETFD) >= 0 && whole.offset == 0, "the whole allocation");
  const DmaBuf part = device->ExportDmaBuf(Bytes(memory.get()) + 4097, 100);
  Expect(fcntl(part.fd.get(), F_GETFD) >= 0 && part.offset == 1, "a part");
  std::printf("  size of the dma-buf: %ld\n",
              static_cast<long>(lseek(whole.fd.get(), 0, SEEK_END)));
}

void TestErrors(const Setup& setup) {
  const auto device = setup.Open();
  void* const bad = reinterpret_cast<void*>(uintptr_t{0x10000});
  const std::string who = StrCat(" on ", device->info().ToString(), " failed: ");
  ExpectWords([&] { device->RangeOf(bad); }, who);
  ExpectWords([&] { device->RangeOf(bad); }, "Is the address or handle one of this device");
  ExpectWords([&] { device->ExportDmaBuf(bad, 1); }, who);
  ExpectWords([&] { device->Allocate(size_t{1} << 50); }, "XLA_PYTHON_CLIENT_MEM_FRACTION");
  ExpectWords([&] { setup.Open(99); }, "(101)");
  const DeviceMemory memory = device->Allocate(100);
  ExpectWords([&] { device->OpenIpc(device->ExportIpc(memory.get())); }, who);
  // Nothing of this stays behind.
  const Stream stream = device->CreateStream(StreamPriority::kNormal);
  device->Synchronize(stream.get());
}

void TestThreads(const Setup& setup) {
  const auto device = setup.Open();
  std::atomic<int> failures = 0;
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 8; ++seed) {
    threads.emplace_back([&device, &failures, seed] {
      try {
        constexpr size_t kNumBytes = 100'001;
        const Stream stream = device->CreateStream(StreamPriority::kNormal);
        const DeviceMemory memory = device->Allocate(kNumBytes);
        const PinnedMemory host = device->AllocatePinned(kNumBytes);
        for (unsigned i = 0; i < 20; ++i) {
          Fill(host.get(), kNumBytes, seed + i);
          device->Copy(stream.get(), memory.get(), host.get(), kNumBytes);
          device->Synchronize(stream.get());
          std::memset(host.get(), 0, kNumBytes);
          device->Copy(stream.get(), host.get(), memory.get(), kNumBytes);
          device->Synchronize(stream.get());
          Expect(IsFilled(host.get(), kNumBytes, seed + i), "the copy");
        }
      } catch (const Error& error) {
        std::printf("  thread %u: %s\n", seed, error.what());
        ++failures;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  Expect(failures == 0, "a thread");
}

}  // namespace

Tests OneProcessTests() {
  return {
      {"info", &TestInfo},       {"copies", &TestCopies},  {"peer_copy", &TestPeerCopy},
      {"events", &TestEvents},   {"values", &TestValues},  {"pinned", &TestPinned},
      {"range", &TestRange},     {"dma_buf", &TestDmaBuf}, {"errors", &TestErrors},
      {"threads", &TestThreads},
  };
}

}  // namespace jaxhet::testing
