#include "xla_plugin/device/device.h"

#include <algorithm>
#include <array>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "tests/cpp/fake_driver.h"
#include "tests/cpp/testing.h"
#include "xla_plugin/base/strings.h"
#include "xla_plugin/device/failure.h"

namespace jaxhet::testing {
namespace {

using ::testing::HasSubstr;

constexpr std::array<const char*, 1> kThisProgram = {nullptr};  // with the fake drivers
constexpr std::array kMissing = {"libnone.so.1", "libnone.so"};
constexpr std::array kOther = {"libc.so.6"};
constexpr std::array<std::string_view, 2> kGpuVendors = {"cuda", "hip"};

std::unique_ptr<Device> OpenFake(std::string_view vendor, int ordinal = 1) {
  fake_driver::Reset();
  auto device = VendorOf(vendor).open(kThisProgram, ordinal);
  fake_driver::Reset();
  return device;
}

void* At(uintptr_t address) { return reinterpret_cast<void*>(address); }

TEST(DeviceTest, VendorsAreListed) {
  EXPECT_EQ(VendorOf("hip").name, "hip");
  EXPECT_THAT(ThrownText([] { VendorOf("metal"); }),
              HasSubstr("UsageError: no vendor is called 'metal'; there are cuda, hip"));
}

TEST(DeviceTest, MissingLibraryIsAReason) {
  for (const auto name : kGpuVendors) {
    const Vendor& vendor = VendorOf(name);
    const std::string text = ThrownText([&] { vendor.list(kMissing); });
    EXPECT_THAT(text, HasSubstr("DeviceError: dlopen: libnone.so.1: cannot open"));
    EXPECT_THAT(text, HasSubstr("; libnone.so: cannot open"));
    EXPECT_THAT(ThrownText([&] { vendor.open(kMissing, 0); }), HasSubstr("libnone.so.1"));
    const std::string old = ThrownText([&] { vendor.list(kOther); });
    EXPECT_THAT(old, HasSubstr("libc.so.6 has no "));
    EXPECT_THAT(old, HasSubstr("Init: it is older than jaxhet needs"));
  }
}

// CUDA and HIP, with drivers that write down what they are asked.

TEST(DeviceTest, GpusAreListed) {
  for (const auto name : kGpuVendors) {
    const std::vector<DeviceInfo> devices = VendorOf(name).list(kThisProgram);
    EXPECT_EQ(devices.size(), size_t{2});
    EXPECT_EQ(devices[1].ToString(), StrCat(name, ":1 (Fake GPU, 0000:01:00.0)"));
    EXPECT_EQ(devices[1].driver_version, 7000);
    EXPECT_TRUE(devices[1].stream_values && devices[1].dma_buf);
    EXPECT_EQ(devices[1].model, "Fake GPU (compute capability 1.1, 101 multiprocessors)");
    EXPECT_NE(devices[0].model, devices[1].model);
  }
}

// An attribute that the driver is too old to know.
TEST(DeviceTest, UnknownAttributeIsNo) {
  for (const auto name : kGpuVendors) {
    fake_driver::Reset();
    fake_driver::FailNext(StrCat(name == "cuda" ? "cu" : "hip", "DeviceGetAttribute"),
                          kGpuInvalidValue);
    EXPECT_FALSE(VendorOf(name).list(kThisProgram)[0].stream_values);
    if (name == "hip") {
      EXPECT_EQ(fake_driver::LastError(), 0);
    }
  }
}

std::string AllCalls() {
  std::string text;
  for (const std::string& call : fake_driver::Calls()) text += StrCat(call, "\n");
  return text;
}

TEST(DeviceTest, AllIsReleasedOnce) {
  for (const auto name : kGpuVendors) {
    const auto device = OpenFake(name);
    {
      const std::span host(static_cast<std::byte*>(At(0x9000)), 0x1000);
      const Registration registration = device->Register(host);
      const Stream stream = device->CreateStream(StreamPriority::kHigh);
      const Event event = device->CreateEvent();
      const DeviceMemory memory = device->Allocate(5);
      const PinnedMemory pinned = device->AllocatePinned(6);
      const IpcMemory ipc = device->OpenIpc(device->ExportIpc(At(0x7123)));
    }
    for (const std::string_view release :
         {"HostUnregister(", "StreamDestroy", "EventDestroy", "Free", "IpcCloseMemHandle"}) {
      const auto calls = fake_driver::Calls();
      EXPECT_EQ(std::ranges::count_if(calls,
                                      [&](const std::string& call) {
                                        return call.find(release) != std::string::npos;
                                      }),
                release == "Free" ? 2 : 1)
          << name << " " << release;
    }
    EXPECT_EQ(fake_driver::ContextDepth(), 0);
  }
}

TEST(DeviceTest, MemoryOfHipIsUncached) {
  const auto device = OpenFake("hip");
  const DeviceMemory shared = device->Allocate(5);
  EXPECT_EQ(fake_driver::Calls().back(), "hipExtMallocWithFlags(0x5, 0x3)");
}

// HIP would wait for it.
TEST(DeviceTest, StreamOfHipThatHasWorkIsNotDestroyed) {
  const auto device = OpenFake("hip");
  {
    const Stream stream = device->CreateStream(StreamPriority::kNormal);
    fake_driver::FailNext("hipStreamQuery", kGpuNotReady);
  }
  EXPECT_EQ(fake_driver::Calls().back(), "hipStreamQuery(0x100)");
  EXPECT_EQ(fake_driver::LastError(), 0);  // XLA must not meet it
}

TEST(DeviceTest, FailureNamesCallDeviceResultAndAdvice) {
  for (const auto name : kGpuVendors) {
    const auto device = OpenFake(name);
    const std::string function = name == "cuda" ? "cuMemcpyAsync" : "hipMemcpyAsync";
    fake_driver::FailNext(function, kGpuInvalidValue);
    const std::string text = ThrownText([&] { device->Copy(nullptr, At(0x10), At(0x20), 1); });
    EXPECT_THAT(text, HasSubstr(StrCat("jaxhet.DeviceError: ", function, " on ", name,
                                       ":1 (Fake GPU, 0000:01:00.0) failed: ")));
    EXPECT_THAT(text, HasSubstr(name == "cuda" ? "CUDA_ERROR_OF_THE_TEST" : "hipErrorOfTheTest"));
    EXPECT_THAT(text, HasSubstr(" (1), a failure of the test. Is the address"));
    EXPECT_EQ(fake_driver::ContextDepth(), 0);
    if (name == "hip") {
      EXPECT_EQ(fake_driver::LastError(), 0);  // XLA must not meet it
    }
  }
}

TEST(DeviceTest, AdviceFitsTheResult) {
  const auto device = OpenFake("cuda");
  const auto fail = [&](int result) {
    fake_driver::FailNext("cuMemAlloc_v2", result);
    return ThrownText([&] { device->Allocate(1); });
  };
  EXPECT_THAT(fail(kGpuOutOfMemory), HasSubstr("XLA_PYTHON_CLIENT_MEM_FRACTION"));
  EXPECT_THAT(fail(kGpuIllegalAddress), HasSubstr("restart it"));
  EXPECT_THAT(fail(kGpuNotSupported), HasSubstr("kernel module"));
  EXPECT_THAT(fail(kGpuInvalidDevice), HasSubstr("CUDA_VISIBLE_DEVICES"));
  EXPECT_THAT(fail(kGpuOperatingSystem), HasSubstr("container"));
  EXPECT_THAT(fail(kGpuInvalidContext), HasSubstr("in that process itself"));
  EXPECT_THAT(fail(12345), HasSubstr("dmesg"));
}

TEST(DeviceTest, NotReadyIsNoFailure) {
  for (const auto name : kGpuVendors) {
    const auto device = OpenFake(name);
    const Stream stream = device->CreateStream(StreamPriority::kNormal);
    const std::string prefix = name == "cuda" ? "cu" : "hip";
    fake_driver::FailNext(prefix + "StreamQuery", kGpuNotReady);
    EXPECT_FALSE(device->IsIdle(stream.get()));
    fake_driver::FailNext(prefix + "StreamQuery", kGpuIllegalAddress);
    EXPECT_THAT(ThrownText([&] { device->IsIdle(stream.get()); }), HasSubstr("restart it"));
    EXPECT_EQ(fake_driver::ContextDepth(), 0);
  }
}

TEST(DeviceTest, FailureToReleaseIsLogged) {
  const auto device = OpenFake("hip");
  const DeviceMemory memory = device->Allocate(1);
  fake_driver::FailNext("hipFree", kGpuInvalidValue);
}

TEST(DeviceTest, DmaBufFallsBack) {
  const auto cuda = OpenFake("cuda");
  fake_driver::FailNext("cuMemGetHandleForAddressRange", kGpuInvalidValue);
  cuda->ExportDmaBuf(At(0x10000), 4096);
  EXPECT_EQ(fake_driver::Calls().back(), "cuMemGetHandleForAddressRange(0x10000, 0x1000, 0x1, 0)");

  const auto hip = OpenFake("hip");
  EXPECT_EQ(hip->ExportDmaBuf(At(0x10001), 1).offset, size_t{0x101});
  fake_driver::FailNext("hsa_amd_portable_export_dmabuf", 0x1001);
  const std::string text = ThrownText([&] { hip->ExportDmaBuf(At(0x10000), 1); });
  EXPECT_THAT(text, HasSubstr("hsa_amd_portable_export_dmabuf on hip:1"));
  EXPECT_THAT(text, HasSubstr("(801)"));
}

// Copies that follow a wait need one.
TEST(DeviceTest, FenceFollowsTheWaitsOfHip) {
  using Kind = StreamValue::Kind;
  const std::array<StreamValue, 2> waits = {
      {{Kind::kWait, At(0x80), 4}, {Kind::kWait, At(0x84), 5}}};
  const std::array<StreamValue, 1> write = {{{Kind::kWrite, At(0x40), 3}}};
  const auto device = OpenFake("hip");
  device->Values(nullptr, waits);
  device->Copy(nullptr, At(0x10), At(0x20), 7);
  device->Values(nullptr, write);
  EXPECT_EQ(AllCalls(),
            "hipStreamWaitValue32(0, 0x80, 0x4, 0, 0xffffffff)\n"
            "hipStreamWaitValue32(0, 0x84, 0x5, 0, 0xffffffff)\n"
            "hipEventRecord(0x100, 0)\n"
            "hipMemcpyAsync(0x10, 0x20, 0x7, 0x4, 0)\n"
            "hipStreamWriteValue32(0, 0x40, 0x3, 0)\n");
}

TEST(DeviceTest, FailedShareOfCudaLeavesNoAddress) {
  const auto device = OpenFake("cuda");
  for (const std::string call : {"cuMemRetainAllocationHandle", "cuMemExportToShareableHandle"}) {
    fake_driver::FailNext(call, kGpuInvalidValue);
    EXPECT_THAT(ThrownText([&] { device->ExportFd(At(0x70)); }), HasSubstr(call));
  }
  for (const std::string call :
       {"cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"}) {
    fake_driver::Reset();
    fake_driver::FailNext(call, kGpuInvalidValue);
    EXPECT_THAT(ThrownText([&] { device->MapFd(Fd(), 0x2000); }), HasSubstr(call));
    const bool reserved = call == "cuMemMap" || call == "cuMemSetAccess";
    EXPECT_EQ(AllCalls().find("cuMemAddressFree") != std::string::npos, reserved);
  }
  EXPECT_EQ(fake_driver::ContextDepth(), 0);
  EXPECT_THAT(ThrownText([] { OpenFake("hip")->ExportFd(At(0x70)); }),
              HasSubstr("hipMemExportToShareableHandle"));
}

TEST(DeviceTest, AnyThreadMayCall) {
  for (const auto name : kGpuVendors) {
    const auto device = OpenFake(name);
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&] {
        for (int j = 0; j < 50; ++j) {
          const Stream stream = device->CreateStream(StreamPriority::kNormal);
          device->Synchronize(stream.get());
        }
        EXPECT_EQ(fake_driver::ContextDepth(), 0);
        EXPECT_EQ(fake_driver::CurrentDevice(), 0);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

}  // namespace
}  // namespace jaxhet::testing
