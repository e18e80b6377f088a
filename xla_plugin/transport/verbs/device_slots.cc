#include "xla_plugin/transport/verbs/device_slots.h"

#include <array>
#include <cstring>
#include <random>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"

namespace jaxhet::verbs {
namespace {

// Of the device's memory: a NIC must read it, too, to prove and to flush.
constexpr int kAccess = ibv::kAccessLocalWrite | ibv::kAccessRemoteWrite | ibv::kAccessRemoteRead;
constexpr size_t kProofBytes = Loopback::kMostBytes;

using Proof = std::array<std::byte, kProofBytes>;

Proof RandomProof() {
  Proof proof;
  std::random_device random;
  for (std::byte& byte : proof) byte = static_cast<std::byte>(random());
  return proof;
}

}  // namespace

DeviceSlots::DeviceSlots(Device& device, NicList nics, const Options& options, size_t num_slots,
                         size_t slot_bytes)
    : SlotMemory(nics, slot_bytes) {
  const size_t num_bytes = CheckedMultiply(num_slots, slot_bytes);
  device_memory_ = device.Allocate(num_bytes);
  device_address_ = device_memory_.get();
  memory_ = {static_cast<std::byte*>(device_address_), num_bytes};
  for (const auto& nic : nics) loopbacks_.emplace_back(nic, options);
  if (Try("dma-buf", &DeviceSlots::RegisterDmaBuf, device)) return;
  if (Try("peer memory", &DeviceSlots::RegisterPeerMemory, device)) return;
  RegisterPinned(device, num_bytes);
}

DeviceSlots::~DeviceSlots() { Deregister(); }

bool DeviceSlots::Try(std::string_view way, void (DeviceSlots::*register_memory)(Device&),
                      Device& device) {
  try {
    (this->*register_memory)(device);
    Prove(device);
    way_ = way;
    return true;
  } catch (const Error& error) {
    Deregister();
    refusals_ += StrCat(refusals_.empty() ? "" : "; ", way, ": ", error.text());
    return false;
  }
}

void DeviceSlots::RegisterDmaBuf(Device& device) {
  const DmaBuf dma_buf = device.ExportDmaBuf(memory_.data(), memory_.size());
  RegisterAt(memory_.data(), [&](const ProtectionDomain& domain, auto& regions) {
    regions.emplace_back(domain, memory_, dma_buf.fd.get(), dma_buf.offset, kAccess);
  });
}

// The module lets NICs' drivers find the pages of a device's address.
void DeviceSlots::RegisterPeerMemory(Device& /*device*/) {
  RegisterAt(memory_.data(), [&](const ProtectionDomain& domain, auto& regions) {
    regions.emplace_back(domain, memory_, kAccess);
  });
}

void DeviceSlots::RegisterPinned(Device& device, size_t num_bytes) {
  loopbacks_.clear();
  device_memory_ = {};
  pinned_memory_ = device.AllocatePinned(num_bytes);
  device_address_ = device.DeviceAddress(pinned_memory_.get());
  memory_ = {static_cast<std::byte*>(pinned_memory_.get()), num_bytes};
  RegisterAt(memory_.data(), [&](const ProtectionDomain& domain, auto& regions) {
    regions.emplace_back(domain, memory_, ibv::kAccessLocalWrite | ibv::kAccessRemoteWrite);
  });
  way_ = StrCat("pinned memory (", refusals_, ")");
}

void DeviceSlots::Prove(Device& device) {
  for (size_t nic = 0; nic < nics().size(); ++nic) {
    for (const size_t offset : {size_t{0}, memory_.size() / 2, memory_.size() - kProofBytes}) {
      ProveAt(device, nic, offset);
    }
  }
}

void DeviceSlots::ProveAt(Device& device, size_t nic, size_t offset) {
  const std::string& name = nics()[nic]->info.name;
  const Stream stream = device.CreateStream(StreamPriority::kNormal);
  const PinnedMemory host = device.AllocatePinned(kProofBytes);
  void* const host_address = device.DeviceAddress(host.get());
  void* const at = memory_.data() + offset;
  const auto address = reinterpret_cast<uint64_t>(at);
  Proof proof = RandomProof();
  Proof seen{};

  std::memcpy(host.get(), proof.data(), kProofBytes);
  device.Copy(stream.get(), at, host_address, kProofBytes);
  device.Synchronize(stream.get());
  loopbacks_[nic].Read(region(nic), address, seen);
  if (seen != proof) {
    Throw(ErrorCode::kTransport, "what ", device.info().ToString(), " wrote, ", name,
          " did not read");
  }
  proof = RandomProof();
  loopbacks_[nic].Write(region(nic), address, proof);
  loopbacks_[nic].Flush(region(nic), address);
  device.Copy(stream.get(), host_address, at, kProofBytes);
  device.Synchronize(stream.get());
  std::memcpy(seen.data(), host.get(), kProofBytes);
  if (seen != proof) {
    Throw(ErrorCode::kTransport, "what ", name, " wrote did not reach ", device.info().ToString());
  }
}

void DeviceSlots::Flush(size_t slot, size_t nic) {
  if (loopbacks_.empty()) return;
  try {
    loopbacks_[nic].Flush(region(nic), address(slot));
  } catch (const Error&) {
    loopbacks_[nic].Flush(region(nic), address(slot));  // over a new queue pair
  }
}

}  // namespace jaxhet::verbs
