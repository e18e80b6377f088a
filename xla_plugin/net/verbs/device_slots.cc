#include "xla_plugin/net/verbs/device_slots.h"

#include <sys/random.h>

#include <array>
#include <utility>
#include <vector>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"

namespace jaxhet::verbs {
namespace {

// To prove that it writes, and to flush, a NIC does as if it were a peer's.
constexpr int kAccess = kPeerWrites | ibv::kAccessRemoteRead;
constexpr int kRounds = 2;  // the second one would expose older bytes

std::vector<std::byte> RandomProof(size_t num_bytes) {
  std::vector<std::byte> proof(num_bytes);
  if (std::cmp_not_equal(getrandom(proof.data(), num_bytes, 0), num_bytes)) ThrowErrno("getrandom");
  return proof;
}

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
  constexpr size_t kBytes = Loopback::kMostBytes;
  PatternWriter writer(device_);
  for (size_t nic = 0; nic < loopbacks_.size(); ++nic) {
    for (const auto place :
         {bytes_.first(kBytes), bytes_.subspan(bytes_.size() / 2, kBytes), bytes_.last(kBytes)}) {
      for (int i = 0; i < kRounds; ++i) ProveRead(writer, nic, place);
      for (int i = 0; i < kRounds; ++i) ProveWrite(nic, place);
    }
  }
}

void DeviceSlots::ProveRead(PatternWriter& writer, size_t nic, std::span<std::byte> place) {
  const std::vector<std::byte> proof = writer.Write(place);
  std::vector<std::byte> seen(proof.size());
  loopbacks_[nic].Send(region_->region(nic), reinterpret_cast<uint64_t>(place.data()), seen);
  if (seen == proof) return;
  Throw(ErrorCode::kTransport, loopbacks_[nic].name(), " read stale data after ",
        device_.info().ToString(), " wrote to its memory: the NIC's reads are not coherent here");
}

void DeviceSlots::ProveWrite(size_t nic, std::span<std::byte> place) {
  const std::vector<std::byte> proof = RandomProof(place.size());
  const auto address = reinterpret_cast<uint64_t>(place.data());
  loopbacks_[nic].Write(region_->region(nic), address, proof);
  loopbacks_[nic].Flush(region_->region(nic), address);
  if (HasProof(device_, place.data(), proof)) return;
  Throw(ErrorCode::kTransport, device_.info().ToString(), " does not see what ",
        loopbacks_[nic].name(), " wrote to its memory: the NIC's writes are not coherent here");
}

}  // namespace jaxhet::verbs
