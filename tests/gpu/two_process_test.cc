#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>

#include "tests/gpu/device_testing.h"

// The tests of two processes. They share a page; the second one finds it as file descriptor
// kPageFd.
namespace jaxhet::testing {
namespace {

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

}  // namespace

Tests TwoProcessTests() {
  return {
      {"ipc", &TestIpc},
      {"ipc-peer", &PeerOfIpc},
  };
}

}  // namespace jaxhet::testing
