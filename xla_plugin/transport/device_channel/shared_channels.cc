// Channels within one host.
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"
#include "xla_plugin/device/device.h"
#include "xla_plugin/transport/device_channel/device_channel.h"
#include "xla_plugin/transport/device_channel/shared_memory.h"

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

// Message of the source to the target: the allocation that its operands lie in (XLA's arena), for
// the target's device to pull out of. The reason follows if it can't be shared.
struct OperandMemoryInfo {
  uint64_t num_bytes;  // 0: nothing is shared
  uint64_t proof_place;
  uint64_t pull_bytes;
  uint64_t by_handle;  // else by a file descriptor
  IpcHandleInfo handle;
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
      : memory_(memory) {
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
                           .mailbox = mailbox_.info()};
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
    Trying([&] { OpenOperands(answer); });
  }
  bool IsProven(Device& device, std::span<const std::byte> proof) override {
    if (!SharedWordsChannel::IsProven(device, proof)) return false;
    if (operands_ == nullptr) return true;
    Trying([&] {
      if (!HasProof(device, operands_ + operand_memory_.proof_place, proof)) {
        Throw(ErrorCode::kTransport,
              "the target's device does not see the source's writes in the mapped memory");
      }
      words().pull_bytes = operand_memory_.pull_bytes;
    });
    return true;
  }
  void Settle(Proxy& proxy) override {
    SharedWordsChannel::Settle(proxy);
    mailbox_.Close();
  }
  const std::byte* At(uint64_t place, size_t num_bytes) const override {
    const uint64_t most = operand_memory_.num_bytes;
    if (operands_ != nullptr && InBounds(place, num_bytes, most)) return operands_ + place;
    Throw(ErrorCode::kTransport, "the source wants ", num_bytes, " bytes pulled from ", place,
          ", which is not in its memory (", most, " bytes)");
  }
  std::string Remark() const override {
    if (why_not_.empty()) return {};
    return StrCat("exchanges are copied once more than needed, since the source's memory can't be ",
                  "read in place: ", why_not_);
  }

 private:
  // Throws for what can't be opened here.
  void OpenOperands(std::string_view answer) {
    OperandMemoryInfo info{};
    if (answer.size() < sizeof info) return;  // the source shares nothing
    std::memcpy(&info, answer.data(), sizeof info);
    const std::string_view why_not = answer.substr(sizeof info);
    if (!why_not.empty()) throw Error(ErrorCode::kTransport, why_not);
    if (info.num_bytes == 0) return;
    if (!InBounds(info.proof_place, kProofBytes, info.num_bytes) || info.pull_bytes == 0) {
      Throw(ErrorCode::kTransport, "the peer's answer is damaged");
    }
    if (info.by_handle != 0) {
      by_handle_ = device_.OpenIpc(info.handle);
      operands_ = static_cast<const std::byte*>(by_handle_.get());
    } else {
      by_fd_ = device_.MapFd(mailbox_.Take(), info.num_bytes);
      operands_ = static_cast<const std::byte*>(by_fd_.get().base);
    }
    operand_memory_ = info;
  }

  // Calls `function`. After an error, operands are copied through the slots.
  template <typename Function>
  void Trying(Function function) {
    try {
      function();
    } catch (const Error& error) {
      why_not_ = error.text();
      operands_ = nullptr;
      by_handle_ = {};
      by_fd_ = {};
    }
  }

  Device& device_;
  SlotPlace place_;
  DeviceMemory memory_;  // the slots', unless they are after the words
  FdMailbox mailbox_;
  IpcMemory by_handle_;  // one of the two
  MappedMemory by_fd_;
  const std::byte* operands_ = nullptr;  // the source's, on our device
  OperandMemoryInfo operand_memory_{};
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
      : SharedWordsChannel(setup.device, info.memory, ExtraBytes(place, info.slot_bytes)) {
    OperandMemoryInfo operands{};
    std::string why_not;
    try {
      operands = ShareOperands(setup.device, OperandsFor(setup, place), info.mailbox);
      operands.pull_bytes = setup.pull_bytes;
    } catch (const Error& error) {
      why_not = error.text();
    }
    answer_.assign(reinterpret_cast<const char*>(&operands), sizeof operands) += why_not;
    if (place == SlotPlace::kIpc) memory_ = setup.device.OpenIpc(info.slots_handle);
    const auto base = reinterpret_cast<uintptr_t>(memory_.get());  // 0 in the same process
    SetSlots(
        place == SlotPlace::kHost ? extra() : reinterpret_cast<void*>(base + info.slots_offset),
        info.slot_bytes);
  }

  std::string Answer() override { return answer_; }
  void Prove(Device& device, std::span<const std::byte> proof) override {
    SharedWordsChannel::Prove(device, proof);
    if (proof_address_ != nullptr) WriteProof(device, proof_address_, proof);
  }
  std::optional<uint64_t> PlaceOf(std::span<const std::byte> operand) const override {
    return range_.OffsetOf(operand);
  }

 private:
  // Shares the allocation that holds `within`; empty: nothing.
  OperandMemoryInfo ShareOperands(Device& device, std::span<std::byte> within,
                                  const FdMailboxInfo& mailbox) {
    OperandMemoryInfo info{};
    if (within.empty()) return info;
    const AddressRange range = device.RangeOf(within.data());
    try {  // only the driver knows how the memory was allocated
      info.handle = device.ExportIpc(within.data());
      info.by_handle = 1;
    } catch (const Error&) {
      LeaveFd(mailbox, device.ExportFd(within.data()));
    }
    range_ = range;
    proof_address_ = within.data();
    info.num_bytes = range.num_bytes;
    info.proof_place =
        static_cast<uint64_t>(within.data() - static_cast<const std::byte*>(range.base));
    return info;
  }

  AddressRange range_{};  // allocation of the operands; empty: not shared
  void* proof_address_ = nullptr;
  std::string answer_;
  IpcMemory memory_;
};

// Throws the reason if the ends can't have slots there.
void CheckPlace(const ChannelSetup& setup, SlotPlace place) {
  const bool is_local = place == SlotPlace::kLocal;
  if (is_local && !setup.same_process) {
    Throw(ErrorCode::kTransport, "the devices are of two processes");
  }
  if (place == SlotPlace::kIpc && setup.same_process) {
    Throw(ErrorCode::kTransport, "both devices are of one process");
  }
  if (!is_local && !setup.same_host) {
    Throw(ErrorCode::kTransport, "the devices are on different hosts");
  }
}

template <SlotPlace kPlace>
MadeChannel Make(const ChannelSetup& setup) {
  CheckPlace(setup, kPlace);
  auto channel = std::make_unique<TargetChannel>(setup, kPlace);
  std::string offer = channel->Offer();
  return {std::move(channel), std::move(offer)};
}

MadeChannel MakeIpc(const ChannelSetup& setup, std::string_view vendor) {
  CheckPlace(setup, SlotPlace::kIpc);
  if (setup.device.info().vendor != vendor || !setup.same_vendor) {
    Throw(ErrorCode::kTransport, "the devices are not both of vendor ", vendor);
  }
  return Make<SlotPlace::kIpc>(setup);
}

MadeChannel MakeCudaIpc(const ChannelSetup& setup) { return MakeIpc(setup, "cuda"); }
MadeChannel MakeHipIpc(const ChannelSetup& setup) { return MakeIpc(setup, "hip"); }

// An offer may hold an address of the same process.
template <SlotPlace kPlace>
std::unique_ptr<DeviceChannel> Open(const ChannelSetup& setup, std::string_view offer) {
  CheckPlace(setup, kPlace);
  return std::make_unique<SourceChannel>(setup, ParseSharedChannelInfo(offer), kPlace);
}

}  // namespace

// Two devices of one process; the slots are the target device's memory.
const DeviceTransport local_transport = {
    .name = "local", .make = &Make<SlotPlace::kLocal>, .open = &Open<SlotPlace::kLocal>};

// Devices of one vendor in two processes; the slots are the target device's memory, mapped into the
// source's process.
const DeviceTransport cuda_ipc_transport = {
    .name = "cuda_ipc", .make = &MakeCudaIpc, .open = &Open<SlotPlace::kIpc>};
const DeviceTransport hip_ipc_transport = {
    .name = "hip_ipc", .make = &MakeHipIpc, .open = &Open<SlotPlace::kIpc>};

// Any two devices; the slots are host memory that both see.
const DeviceTransport host_transport = {
    .name = "host", .make = &Make<SlotPlace::kHost>, .open = &Open<SlotPlace::kHost>};

}  // namespace jaxhet
