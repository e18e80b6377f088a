#include "xla_plugin/net/verbs/device_slots.h"

#include <vector>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"

namespace jaxhet::verbs {
namespace {

// To prove that it writes, and to flush, a NIC does as if it were a peer's.
constexpr int kAccess = kPeerWrites | ibv::kAccessRemoteRead;
constexpr int kRounds = 2;  // the second one would expose older bytes
constexpr size_t kCopied = 4096;

}  // namespace

DeviceSlots::DeviceSlots(Device& device, NicList nics, const Options& options, size_t num_slots,
                         size_t slot_bytes)
    : device_(device) {
  const size_t num_bytes = CheckedMultiply(num_slots, slot_bytes);
  try {
    device_memory_ = device.Allocate(num_bytes);
    device_address_ = device_memory_.get();
    bytes_ = {static_cast<std::byte*>(device_address_), num_bytes};
    for (const auto& nic : nics) loopbacks_.emplace_back(nic, options);
    const DmaBuf dma_buf = device.ExportDmaBuf(bytes_.data(), num_bytes);
    region_ = std::make_unique<NicMemory>(nics, bytes_, dma_buf, kAccess);
    Prove();
  } catch (const Error& error) {
    why_pinned_ = error.text();
    region_.reset();
    loopbacks_.clear();
    device_memory_ = {};
    pinned_memory_ = device.AllocatePinned(num_bytes);
    device_address_ = device.DeviceAddress(pinned_memory_.get());
    bytes_ = {static_cast<std::byte*>(pinned_memory_.get()), num_bytes};
    region_ = std::make_unique<NicMemory>(nics, bytes_, kPeerWrites);
  }
  slots_ = {region_.get(), bytes_.data(), slot_bytes};
}

void DeviceSlots::Flush(size_t slot, size_t nic) {
  if (!loopbacks_.empty()) loopbacks_[nic].Flush(region_->region(nic), slots_.address(slot));
}

void DeviceSlots::Prove() {
  PatternWriter writer(device_);
  const std::span<std::byte> from = bytes_.first(kCopied);
  const std::span<std::byte> to = bytes_.last(kCopied);
  for (size_t nic = 0; nic < loopbacks_.size(); ++nic) {
    for (int i = 0; i < kRounds; ++i) {
      const std::vector<std::byte> proof = writer.Write(from);
      loopbacks_[nic].Copy(region_->region(nic), from, to.data());
      loopbacks_[nic].Flush(region_->region(nic), reinterpret_cast<uint64_t>(to.data()));
      if (HasProof(device_, to.data(), proof)) continue;
      Throw(ErrorCode::kTransport, device_.info().ToString(), " does not see what ",
            loopbacks_[nic].name(), " copied in its memory: what it wrote there, or what the NIC ",
            "wrote, is stale");
    }
  }
}

}  // namespace jaxhet::verbs
