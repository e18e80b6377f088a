// Channels within one host.
#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"
#include "xla_plugin/device/proof.h"
#include "xla_plugin/transport/device_channel/device_channel.h"
#include "xla_plugin/transport/device_channel/operand_memory.h"
#include "xla_plugin/transport/device_channel/shared_words.h"

namespace jaxhet {
namespace {

size_t SlotsBytes(size_t slot_bytes) { return CheckedMultiply(kChannelSlots, slot_bytes); }

// The target's end, which pulls if it can.
class TargetChannel : public SharedWordsChannel {
 public:
  TargetChannel(const ChannelSetup& setup, size_t extra_bytes)
      : SharedWordsChannel(setup.device, extra_bytes), device_(setup.device) {}

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

 protected:
  SharedChannelInfo Info() const {
    return {.memory = memory_info(),
            .slot_bytes = slot_bytes(),
            .slots_handle = {},
            .slots_offset = 0,
            .mailbox = operands_.mailbox()};
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
  PeerOperandMemory operands_;
  std::string why_not_;
};

// The source's end. `operands` as in ChannelSetup.
class SourceChannel : public SharedWordsChannel {
 public:
  SourceChannel(const ChannelSetup& setup, const SharedChannelInfo& info, size_t extra_bytes,
                std::span<std::byte> operands)
      : SharedWordsChannel(setup.device, info.memory, extra_bytes),
        operands_(setup.device, operands, setup.pull_bytes, info.mailbox) {}

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
};

// The slots are memory of the target's device.
class DeviceMemoryChannel final : public TargetChannel {
 public:
  explicit DeviceMemoryChannel(const ChannelSetup& setup)
      : TargetChannel(setup, 0), memory_(setup.device.Allocate(SlotsBytes(setup.slot_bytes))) {
    SetSlots(memory_.get(), setup.slot_bytes);
  }

  SharedChannelInfo LocalInfo() const {
    SharedChannelInfo info = Info();
    info.slots_offset = reinterpret_cast<uintptr_t>(memory_.get());
    return info;
  }
  SharedChannelInfo IpcInfo(Device& device) const {
    SharedChannelInfo info = Info();
    info.slots_handle = device.ExportIpc(memory_.get());
    const auto* const base = static_cast<const std::byte*>(device.RangeOf(memory_.get()).base);
    info.slots_offset = static_cast<uint64_t>(static_cast<std::byte*>(memory_.get()) - base);
    return info;
  }

 private:
  DeviceMemory memory_;
};

class LocalChannelSource final : public SharedWordsChannel {
 public:
  LocalChannelSource(Device& device, const SharedChannelInfo& info)
      : SharedWordsChannel(device, info.memory, 0) {
    SetSlots(reinterpret_cast<void*>(info.slots_offset), info.slot_bytes);
  }
};

class IpcChannelSource final : public SourceChannel {
 public:
  IpcChannelSource(const ChannelSetup& setup, const SharedChannelInfo& info)
      : SourceChannel(setup, info, 0, setup.operands),
        memory_(setup.device.OpenIpc(info.slots_handle)) {
    SetSlots(static_cast<std::byte*>(memory_.get()) + info.slots_offset, info.slot_bytes);
  }

 private:
  IpcMemory memory_;
};

// The slots are host memory that both processes see.
class HostChannel final : public TargetChannel {
 public:
  explicit HostChannel(const ChannelSetup& setup)
      : TargetChannel(setup, SlotsBytes(HostSlotBytes(setup))) {
    SetSlots(extra(), HostSlotBytes(setup));
  }

  using TargetChannel::Info;
};

// Operands that the target pulls over host memory.
std::span<std::byte> HostOperands(const ChannelSetup& setup) {
  const bool can_pull = setup.same_vendor && setup.device.info().host_memory;
  return can_pull ? setup.operands : std::span<std::byte>{};
}

class HostChannelSource final : public SourceChannel {
 public:
  HostChannelSource(const ChannelSetup& setup, const SharedChannelInfo& info)
      : SourceChannel(setup, info, SlotsBytes(info.slot_bytes), HostOperands(setup)) {
    SetSlots(extra(), info.slot_bytes);
  }
};

MadeChannel MakeIpcChannel(const ChannelSetup& setup, std::string_view vendor) {
  if (setup.same_process) Throw(ErrorCode::kTransport, "both devices are of one process");
  if (!setup.same_host) Throw(ErrorCode::kTransport, "the devices are on different hosts");
  if (setup.device.info().vendor != vendor || !setup.same_vendor) {
    Throw(ErrorCode::kTransport, "the devices are not both of vendor ", vendor);
  }
  auto channel = std::make_unique<DeviceMemoryChannel>(setup);
  std::string offer = ToOffer(channel->IpcInfo(setup.device));
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
  auto channel = std::make_unique<DeviceMemoryChannel>(setup);
  std::string offer = ToOffer(channel->LocalInfo());
  return {std::move(channel), std::move(offer)};
}

std::unique_ptr<DeviceChannel> OpenLocalChannel(const ChannelSetup& setup, std::string_view offer) {
  CheckSameProcess(setup);  // the offer holds an address
  return std::make_unique<LocalChannelSource>(setup.device, ParseSharedChannelInfo(offer));
}

std::unique_ptr<DeviceChannel> OpenIpcChannel(const ChannelSetup& setup, std::string_view offer) {
  CheckSameHost(setup);
  return std::make_unique<IpcChannelSource>(setup, ParseSharedChannelInfo(offer));
}

MadeChannel MakeHostChannel(const ChannelSetup& setup) {
  CheckSameHost(setup);
  auto channel = std::make_unique<HostChannel>(setup);
  std::string offer = ToOffer(channel->Info());
  return {std::move(channel), std::move(offer)};
}

std::unique_ptr<DeviceChannel> OpenHostChannel(const ChannelSetup& setup, std::string_view offer) {
  CheckSameHost(setup);
  return std::make_unique<HostChannelSource>(setup, ParseSharedChannelInfo(offer));
}

}  // namespace

// Two devices of one process; the slots are the target device's memory.
const DeviceTransport kLocalChannel = {
    .name = "local", .make = &MakeLocalChannel, .open = &OpenLocalChannel};

// Devices of one vendor in two processes; the slots are the target device's memory, mapped into the
// source's process.
const DeviceTransport kCudaIpcChannel = {
    .name = "cuda_ipc",
    .make = [](const ChannelSetup& setup) { return MakeIpcChannel(setup, "cuda"); },
    .open = &OpenIpcChannel};
const DeviceTransport kHipIpcChannel = {
    .name = "hip_ipc",
    .make = [](const ChannelSetup& setup) { return MakeIpcChannel(setup, "hip"); },
    .open = &OpenIpcChannel};

// Any two devices; the slots are host memory that both see.
const DeviceTransport kHostChannel = {
    .name = "host", .make = &MakeHostChannel, .open = &OpenHostChannel};

}  // namespace jaxhet
