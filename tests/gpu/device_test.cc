// The device layer on a real GPU. Each test is a process of its own, and some start a second one,
// which may see another GPU; run.sh runs them all.
//
//   gpu_device_test VENDOR LIBRARY list      the tests' names
//   gpu_device_test VENDOR LIBRARY devices   the number of devices, or why there are none
//   gpu_device_test VENDOR LIBRARY TEST [PEER_VISIBLE]
//                                            the last line is "ok", "skip: ..." or "FAIL: ..."

#include "xla_plugin/device/device.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "xla_plugin/base/error.h"

namespace jaxhet::testing {
namespace {

struct Skip : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Setup {
  std::string vendor;
  std::string library;
  std::string test;
  std::string peer_visible;  // CUDA_VISIBLE_DEVICES of the second process

  std::unique_ptr<Device> Open(int ordinal = 0) const {
    const std::array<const char*, 1> libraries = {library.c_str()};
    return VendorOf(vendor).open(libraries, ordinal);
  }
  std::vector<DeviceInfo> List() const {
    const std::array<const char*, 1> libraries = {library.c_str()};
    return VendorOf(vendor).list(libraries);
  }
};

void Expect(bool condition, std::string_view what) {
  if (!condition) Throw(ErrorCode::kDevice, "wrong: ", what);
}

// A DeviceError.
void ExpectWords(const std::function<void()>& function, std::string_view words) {
  try {
    function();
  } catch (const Error& error) {
    std::printf("  %s\n", error.what());
    Expect(error.code() == ErrorCode::kDevice, "the error's class");
    Expect(error.text().find(words) != std::string_view::npos, words);
    return;
  }
  Throw(ErrorCode::kDevice, "no error with ", words);
}

std::byte* Bytes(void* address) { return static_cast<std::byte*>(address); }

void Fill(void* address, size_t num_bytes, unsigned seed) {
  for (size_t i = 0; i < num_bytes; ++i) Bytes(address)[i] = static_cast<std::byte>(i * 7 + seed);
}

bool IsFilled(const void* address, size_t num_bytes, unsigned seed) {
  const auto* const bytes = static_cast<const std::byte*>(address);
  for (size_t i = 0; i < num_bytes; ++i) {
    if (bytes[i] != static_cast<std::byte>(i * 7 + seed)) return false;
  }
  return true;
}

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
  const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - begin;
  std::printf("  %u turns, %.1f us each\n", kTurns, time.count() / kTurns);
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

// The tests of two processes. They share a page; the second one finds it as file descriptor
// kPageFd.
constexpr int kPageFd = 100;
constexpr size_t kPageBytes = 1 << 16;
constexpr size_t kIpcBytes = (2 << 20) + 12345;

struct Page {
  uint32_t ping;  // the first process writes
  uint32_t pong;  // the second one
  IpcHandleInfo handle;
};

Page* MapPage() {
  void* const page = mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_SHARED, kPageFd, 0);
  if (page == MAP_FAILED) ThrowErrno("mmap of the shared page");
  return static_cast<Page*>(page);
}

class SecondProcess {
 public:
  explicit SecondProcess(const Setup& setup) {
    const pid_t parent = getpid();
    pid_ = fork();  // before this process has used the driver
    if (pid_ != 0) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    if (!setup.peer_visible.empty()) {
      setenv("CUDA_VISIBLE_DEVICES", setup.peer_visible.c_str(), 1);
    }
    const std::string test = setup.test + "-peer";
    execl("/proc/self/exe", "gpu_device_test", setup.vendor.c_str(), setup.library.c_str(),
          test.c_str(), nullptr);
    _exit(1);
  }

  // Waits for the stream, but not for a process that has failed.
  void Await(Device& device, StreamHandle stream) {
    while (!device.IsIdle(stream)) Expect(IsAlive() || device.IsIdle(stream), "the second process");
  }
  void Join() {
    if (pid_ > 0) waitpid(pid_, &status_, 0);
    pid_ = 0;
    Expect(status_ == 0, "the second process");
  }

 private:
  bool IsAlive() {
    if (pid_ > 0 && waitpid(pid_, &status_, WNOHANG) == pid_) pid_ = 0;
    return pid_ > 0 || status_ == 0;
  }

  pid_t pid_ = 0;
  int status_ = 0;
};

void MakePage() {
  const int fd = memfd_create("page", 0);
  Expect(fd >= 0 && ftruncate(fd, kPageBytes) == 0 && dup2(fd, kPageFd) == kPageFd, "memfd");
}

// The first process's memory is read and then written by the second one; stream values say when.
void TestIpc(const Setup& setup) {
  MakePage();
  SecondProcess second(setup);
  Page* const page = MapPage();
  const auto device = setup.Open();
  std::printf("  first:  %s\n", device->info().ToString().c_str());
  const Registration registration = device->Register(std::span(Bytes(page), kPageBytes));
  const Stream stream = device->CreateStream(StreamPriority::kNormal);
  const DeviceMemory memory = device->Allocate(kIpcBytes);
  const PinnedMemory host = device->AllocatePinned(kIpcBytes);
  Fill(host.get(), kIpcBytes, 1);
  page->handle = device->ExportIpc(Bytes(memory.get()) + 1);  // any address of the allocation
  device->Copy(stream.get(), memory.get(), host.get(), kIpcBytes);
  device->WriteValue(stream.get(), device->DeviceAddress(&page->ping), 1);
  device->WaitValue(stream.get(), device->DeviceAddress(&page->pong), 1);
  device->Copy(stream.get(), host.get(), memory.get(), kIpcBytes);
  second.Await(*device, stream.get());
  Expect(IsFilled(host.get(), kIpcBytes, 2), "what the second process wrote");
  second.Join();
}

void PeerOfIpc(const Setup& setup) {
  Page* const page = MapPage();
  const auto device = setup.Open();
  std::printf("  second: %s\n", device->info().ToString().c_str());
  const Registration registration = device->Register(std::span(Bytes(page), kPageBytes));
  const Stream stream = device->CreateStream(StreamPriority::kNormal);
  const PinnedMemory host = device->AllocatePinned(kIpcBytes);
  device->WaitValue(stream.get(), device->DeviceAddress(&page->ping), 1);
  device->Synchronize(stream.get());
  const IpcMemory memory = device->OpenIpc(page->handle);
  device->Copy(stream.get(), host.get(), memory.get(), kIpcBytes);
  device->Synchronize(stream.get());
  Expect(IsFilled(host.get(), kIpcBytes, 1), "what the first process wrote");
  Fill(host.get(), kIpcBytes, 2);
  device->Copy(stream.get(), memory.get(), host.get(), kIpcBytes);
  device->WriteValue(stream.get(), device->DeviceAddress(&page->pong), 1);
  device->Synchronize(stream.get());
}

// By name. The second process of test x runs x-peer.
std::map<std::string, void (*)(const Setup&)> Tests() {
  return {
      {"info", &TestInfo},       {"copies", &TestCopies},  {"peer_copy", &TestPeerCopy},
      {"events", &TestEvents},   {"values", &TestValues},  {"pinned", &TestPinned},
      {"range", &TestRange},     {"dma_buf", &TestDmaBuf}, {"errors", &TestErrors},
      {"threads", &TestThreads}, {"ipc", &TestIpc},        {"ipc-peer", &PeerOfIpc},
  };
}

// A line "calls <entry point> <number>" for each of the HIP double's.
void PrintCalls(const std::string& library) {
  void* const handle = dlopen(library.c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (handle == nullptr) return;
  const auto calls = reinterpret_cast<size_t (*)(char*, size_t)>(dlsym(handle, "hipDoubleCalls"));
  if (calls == nullptr) return;
  std::string text(calls(nullptr, 0) + 1, '\0');
  calls(text.data(), text.size());
  std::istringstream lines(text.c_str());  // without the closing NUL
  for (std::string line; std::getline(lines, line);) std::printf("calls %s\n", line.c_str());
}

int Run(const Setup& setup) {
  const auto tests = Tests();
  if (setup.test == "list") {
    for (const auto& [name, test] : tests) {
      if (!name.ends_with("-peer")) std::printf("%s\n", name.c_str());
    }
    return 0;
  }
  if (setup.test == "devices") {
    std::printf("%zu\n", setup.List().size());
    return 0;
  }
  tests.at(setup.test)(setup);
  PrintCalls(setup.library);
  if (!setup.test.ends_with("-peer")) std::printf("ok\n");
  return 0;
}

}  // namespace
}  // namespace jaxhet::testing

int main(int argc, char** argv) {  // NOLINT(misc-const-correctness)
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  try {
    if (argc < 4) jaxhet::Throw(jaxhet::ErrorCode::kUsage, "VENDOR LIBRARY TEST [PEER_VISIBLE]");
    return jaxhet::testing::Run({argv[1], argv[2], argv[3], argc > 4 ? argv[4] : ""});
  } catch (const jaxhet::testing::Skip& skip) {
    std::printf("skip: %s\n", skip.what());
    return 0;
  } catch (const std::exception& error) {
    std::printf("FAIL: %s\n", error.what());
    return 1;
  }
}
