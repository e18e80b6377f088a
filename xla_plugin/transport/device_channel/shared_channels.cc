// Channels within one host.
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"
#include "xla_plugin/device/proof.h"
#include "xla_plugin/transport/device_channel/device_channel.h"
#include "xla_plugin/transport/device_channel/fd_mailbox.h"
#include "xla_plugin/transport/device_channel/operand_memory.h"
#include "xla_plugin/transport/shared_memory.h"

namespace jaxhet {
namespace {

constexpr size_t kPage = 4096;
// Offset of the bytes after the words, a multiple of kPage.
constexpr size_t kExtraOffset = (sizeof(SharedWords) + 2 * kPage - 1) & ~(kPage - 1);

// Place of the slots: memory of the target's device, by its address in the same process or by an
// IPC handle; or host memory after the words.
enum class SlotPlace { kLocal, kIpc, kHost };

size_t SlotsBytes(size_t slot_bytes) { return CheckedMultiply(kChannelSlots, slot_bytes); }

size_t ExtraBytes(SlotPlace place, size_t slot_bytes) {
  return place == SlotPlace::kHost ? SlotsBytes(slot_bytes) : 0;
}

// Message of the target to the source.
struct SharedChannelInfo {
  SharedMemoryInfo memory;
  uint64_t slot_bytes;
  IpcHandleInfo slots_handle;  // handle of the slots' allocation, and the offset there,
  uint64_t slots_offset;       // or their address, in the same process
  FdMailboxInfo mailbox;       // for the source's memory that is to be pulled from
};

// Throws TransportError for other bytes.
SharedChannelInfo ParseSharedChannelInfo(std::string_view offer) {
  SharedChannelInfo info{};
  if (offer.size() != sizeof info) Throw(ErrorCode::kTransport, "the peer's offer is cut");
  std::memcpy(&info, offer.data(), sizeof info);
  CheckSlotBytes(info.slot_bytes);
  return info;
}

// A channel whose words, and `extra_bytes` of whole pages after them, both processes have mapped
// and both devices see.
class SharedWordsChannel : public DeviceChannel {
 public:
  SharedWordsChannel(Device& device, size_t extra_bytes) : memory_(kExtraOffset + extra_bytes) {
    Register(device);
    words().intact.value = kOpen;  // the rest is zero, as new shared memory is
  }
  SharedWordsChannel(Device& device, const SharedMemoryInfo& memory, size_t extra_bytes)
      : memory_(memory, SharedMemory::Access::kReadWrite) {
    if (memory.num_bytes != kExtraOffset + extra_bytes) {
      Throw(ErrorCode::kTransport,
            "the device channel has another size here; is it another jaxhet?");
    }
    Register(device);
  }

  void Settle(Proxy& /*proxy*/) override { memory_.CloseFd(); }

 protected:
  const SharedMemoryInfo& memory_info() const { return memory_.info(); }
  // The device's address of the extra bytes.
  void* extra() const { return extra_; }

 private:
  void Register(Device& device) {
    const std::span<std::byte> pages = memory_.pages();
    registration_ = device.Register(pages);
    auto* const address = static_cast<std::byte*>(device.DeviceAddress(pages.data()));
    SetWords(*reinterpret_cast<SharedWords*>(memory_.data()),
             address + (memory_.data() - pages.data()));
    extra_ = address + kExtraOffset;
  }

  SharedMemory memory_;
  Registration registration_;
  void* extra_ = nullptr;
};

// The target's end, which pulls if it can.
class TargetChannel final : public SharedWordsChannel {
 public:
  TargetChannel(const ChannelSetup& setup, SlotPlace place)
      : SharedWordsChannel(setup.device, ExtraBytes(place, HostSlotBytes(setup))),
        device_(setup.device),
        place_(place) {
    if (place == SlotPlace::kHost) {
      SetSlots(extra(), HostSlotBytes(setup));
    } else {
      memory_ = device_.Allocate(SlotsBytes(setup.slot_bytes));
      SetSlots(memory_.get(), setup.slot_bytes);
    }
  }

  std::string Offer() const {
    SharedChannelInfo info{.memory = memory_info(),
                           .slot_bytes = slot_bytes(),
                           .slots_handle = {},
                           .slots_offset = 0,
                           .mailbox = operands_.mailbox()};
    auto* const slots = static_cast<std::byte*>(memory_.get());
    if (place_ == SlotPlace::kLocal) info.slots_offset = reinterpret_cast<uintptr_t>(slots);
    if (place_ == SlotPlace::kIpc) {
      info.slots_handle = device_.ExportIpc(slots);
      const auto* const base = static_cast<const std::byte*>(device_.RangeOf(slots).base);
      info.slots_offset = static_cast<uint64_t>(slots - base);
    }
    return {reinterpret_cast<const char*>(&info), sizeof info};
  }
  void Accept(std::string_view answer) override {
    Trying([&] { operands_.Open(device_, answer); });
  }
  bool IsProven(Device& device, std::span<const std::byte> proof) override {
    if (!SharedWordsChannel::IsProven(device, proof)) return false;
    if (!operands_.is_open()) return true;
    Trying([&] {
      if (!HasProof(device, operands_.proof_address(), proof)) {
        Throw(ErrorCode::kTransport,
              "the target's device does not see the source's writes in the mapped memory");
      }
      words().pull_bytes = operands_.pull_bytes();
    });
    return true;
  }
  void Settle(Proxy& proxy) override {
    SharedWordsChannel::Settle(proxy);
    operands_.Settle();
  }
  const std::byte* At(uint64_t place, size_t num_bytes) const override {
    return operands_.At(place, num_bytes);
  }
  std::string Remark() const override {
    if (why_not_.empty()) return {};
    return StrCat("exchanges are copied once more than needed, since the source's memory can't be ",
                  "read in place: ", why_not_);
  }

 private:
  // The slots do it, too.
  template <typename Function>
  void Trying(Function function) {
    try {
      function();
    } catch (const Error& error) {
      why_not_ = error.text();
      operands_.Close();
    }
  }

  Device& device_;
  SlotPlace place_;
  DeviceMemory memory_;  // the slots', unless they are after the words
  PeerOperandMemory operands_;
  std::string why_not_;
};

// Operands that the target pulls; none between devices of one process.
std::span<std::byte> OperandsFor(const ChannelSetup& setup, SlotPlace place) {
  const bool can_pull =
      place == SlotPlace::kIpc ||
      (place == SlotPlace::kHost && setup.same_vendor && setup.device.info().host_memory);
  return can_pull ? setup.operands : std::span<std::byte>{};
}

// The source's end.
class SourceChannel final : public SharedWordsChannel {
 public:
  SourceChannel(const ChannelSetup& setup, const SharedChannelInfo& info, SlotPlace place)
      : SharedWordsChannel(setup.device, info.memory, ExtraBytes(place, info.slot_bytes)),
        operands_(setup.device, OperandsFor(setup, place), setup.pull_bytes, info.mailbox) {
    if (place == SlotPlace::kIpc) memory_ = setup.device.OpenIpc(info.slots_handle);
    const auto base = reinterpret_cast<uintptr_t>(memory_.get());  // 0 in the same process
    SetSlots(
        place == SlotPlace::kHost ? extra() : reinterpret_cast<void*>(base + info.slots_offset),
        info.slot_bytes);
  }

  std::string Answer() override { return operands_.answer(); }
  void Prove(Device& device, std::span<const std::byte> proof) override {
    SharedWordsChannel::Prove(device, proof);
    if (operands_.is_shared()) WriteProof(device, operands_.proof_address(), proof);
  }
  std::optional<uint64_t> PlaceOf(std::span<const std::byte> operand) const override {
    return operands_.PlaceOf(operand);
  }

 private:
  OwnOperandMemory operands_;
  IpcMemory memory_;
};

MadeChannel Make(const ChannelSetup& setup, SlotPlace place) {
  auto channel = std::make_unique<TargetChannel>(setup, place);
  std::string offer = channel->Offer();
  return {std::move(channel), std::move(offer)};
}

void CheckSameProcess(const ChannelSetup& setup) {
  if (!setup.same_process) Throw(ErrorCode::kTransport, "the devices are of two processes");
}

void CheckSameHost(const ChannelSetup& setup) {
  if (!setup.same_host) Throw(ErrorCode::kTransport, "the devices are on different hosts");
}

MadeChannel MakeLocalChannel(const ChannelSetup& setup) {
  CheckSameProcess(setup);
  return Make(setup, SlotPlace::kLocal);
}

std::unique_ptr<DeviceChannel> OpenLocalChannel(const ChannelSetup& setup, std::string_view offer) {
  CheckSameProcess(setup);  // the offer holds an address
  return std::make_unique<SourceChannel>(setup, ParseSharedChannelInfo(offer), SlotPlace::kLocal);
}

MadeChannel MakeIpcChannel(const ChannelSetup& setup, std::string_view vendor) {
  if (setup.same_process) Throw(ErrorCode::kTransport, "both devices are of one process");
  CheckSameHost(setup);
  if (setup.device.info().vendor != vendor || !setup.same_vendor) {
    Throw(ErrorCode::kTransport, "the devices are not both of vendor ", vendor);
  }
  return Make(setup, SlotPlace::kIpc);
}

MadeChannel MakeCudaIpcChannel(const ChannelSetup& setup) { return MakeIpcChannel(setup, "cuda"); }
MadeChannel MakeHipIpcChannel(const ChannelSetup& setup) { return MakeIpcChannel(setup, "hip"); }

std::unique_ptr<DeviceChannel> OpenIpcChannel(const ChannelSetup& setup, std::string_view offer) {
  CheckSameHost(setup);
  return std::make_unique<SourceChannel>(setup, ParseSharedChannelInfo(offer), SlotPlace::kIpc);
}

MadeChannel MakeHostChannel(const ChannelSetup& setup) {
  CheckSameHost(setup);
  return Make(setup, SlotPlace::kHost);
}

std::unique_ptr<DeviceChannel> OpenHostChannel(const ChannelSetup& setup, std::string_view offer) {
  CheckSameHost(setup);
  return std::make_unique<SourceChannel>(setup, ParseSharedChannelInfo(offer), SlotPlace::kHost);
}

}  // namespace

// Two devices of one process; the slots are the target device's memory.
const DeviceTransport local_transport = {
    .name = "local", .make = &MakeLocalChannel, .open = &OpenLocalChannel};

// Devices of one vendor in two processes; the slots are the target device's memory, mapped into the
// source's process.
const DeviceTransport cuda_ipc_transport = {
    .name = "cuda_ipc", .make = &MakeCudaIpcChannel, .open = &OpenIpcChannel};
const DeviceTransport hip_ipc_transport = {
    .name = "hip_ipc", .make = &MakeHipIpcChannel, .open = &OpenIpcChannel};

// Any two devices; the slots are host memory that both see.
const DeviceTransport host_transport = {
    .name = "host", .make = &MakeHostChannel, .open = &OpenHostChannel};

}  // namespace jaxhet
