#include "xla_plugin/transport/verbs/device_region.h"

#include <sys/random.h>

#include <array>
#include <optional>
#include <utility>
#include <vector>

#include "xla_plugin/base/error.h"

namespace jaxhet::verbs {
namespace {

// To prove that it writes, and to flush, a NIC does as if it were a peer's.
constexpr int kReadAndWriteAccess =
    ibv::kAccessLocalWrite | ibv::kAccessRemoteWrite | ibv::kAccessRemoteRead;
constexpr int kReadAccess = 0;

constexpr int kFirstRounds = 2;                   // the second one would expose older bytes
constexpr size_t kProvenBytes = size_t{2} << 20;  // a page of a GPU
constexpr size_t kLoadBytes = size_t{8} << 20;

std::vector<std::byte> RandomProof(size_t num_bytes) {
  std::vector<std::byte> proof(num_bytes);
  if (std::cmp_not_equal(getrandom(proof.data(), num_bytes, 0), num_bytes)) ThrowErrno("getrandom");
  return proof;
}

}  // namespace

DeviceRegion::DeviceRegion(Device& device, NicList nics, const Options& options,
                           std::span<std::byte> memory,
                           std::span<const std::span<std::byte>> places, Use use)
    : NicMemory(nics), use_(use) {
  const int access = use == Use::kRead ? kReadAccess : kReadAndWriteAccess;
  for (const auto& nic : nics) loopbacks_.emplace_back(nic, options);
  std::string refusals;
  for (const auto& [way, register_memory] :
       {std::pair<std::string_view, RegisterFunction>{"dma-buf", &DeviceRegion::RegisterDmaBuf},
        {"peer memory", &DeviceRegion::RegisterPeerMemory}}) {
    try {
      (this->*register_memory)(device, memory, access);
      Prove(device, places, kFirstRounds, 0);
      way_ = way;
      return;
    } catch (const Error& error) {
      Deregister();
      refusals += StrCat(refusals.empty() ? "" : "; ", way, ": ", error.text());
    }
  }
  throw Error(ErrorCode::kTransport, refusals);
}

void DeviceRegion::Prove(Device& device, std::span<const std::span<std::byte>> places, int rounds,
                         size_t load_bytes) {
  PatternWriter writer(device, load_bytes);
  for (size_t nic = 0; nic < nics().size(); ++nic) {
    for (const auto place : places) {
      for (int i = 0; i < rounds; ++i) ProveRead(device, writer, nic, place);
      if (use_ == Use::kRead) continue;
      for (int i = 0; i < rounds; ++i) ProveWrite(device, nic, place);
    }
  }
}

void DeviceRegion::RegisterDmaBuf(Device& device, std::span<std::byte> memory, int access) {
  const DmaBuf dma_buf = device.sharing().ExportDmaBuf(memory.data(), memory.size());
  Register([&](const ProtectionDomain& domain, auto& regions) {
    regions.emplace_back(domain, memory, dma_buf.fd.get(), dma_buf.offset, access);
  });
}

// The module lets NICs' drivers find the pages of a device's address.
void DeviceRegion::RegisterPeerMemory(Device& /*device*/, std::span<std::byte> memory, int access) {
  Register([&](const ProtectionDomain& domain, auto& regions) {
    regions.emplace_back(domain, memory, access);
  });
}

void DeviceRegion::ProveRead(const Device& device, PatternWriter& writer, size_t nic,
                             std::span<std::byte> place) {
  const std::vector<std::byte> proof = writer.Write(place, /*by_event=*/use_ == Use::kRead);
  std::vector<std::byte> seen(proof.size());
  loopbacks_[nic].Send(region(nic), reinterpret_cast<uint64_t>(place.data()), seen);
  if (seen == proof) return;
  Throw(ErrorCode::kTransport, nics()[nic]->info.name, " read stale data after ",
        device.info().ToString(), " wrote to its memory: the NIC's reads are not coherent here");
}

void DeviceRegion::ProveWrite(Device& device, size_t nic, std::span<std::byte> place) {
  const std::vector<std::byte> proof = RandomProof(place.size());
  const auto address = reinterpret_cast<uint64_t>(place.data());
  loopbacks_[nic].Write(region(nic), address, proof);
  loopbacks_[nic].Flush(region(nic), address);
  if (HasProof(device, place.data(), proof)) return;
  Throw(ErrorCode::kTransport, device.info().ToString(), " does not see what ",
        nics()[nic]->info.name, " wrote to its memory: the NIC's writes are not coherent here");
}

void DeviceRegion::Flush(uint64_t address, size_t nic) {
  try {
    loopbacks_[nic].Flush(region(nic), address);
  } catch (const Error&) {
    loopbacks_[nic].Flush(region(nic), address);  // over a new queue pair
  }
}

std::string ProveSends(Device& device, NicMemory::NicList nics, const Options& options,
                       int rounds) {
  using Use = DeviceRegion::Use;
  for (const Use use : {Use::kReadAndWrite, Use::kRead}) {
    const DeviceMemory memory =
        use == Use::kRead ? device.AllocateCached(kProvenBytes) : device.Allocate(kProvenBytes);
    const std::span bytes(static_cast<std::byte*>(memory.get()), kProvenBytes);
    const std::array places = {bytes.last(Loopback::kMostBytes)};
    std::optional<DeviceRegion> region;
    try {
      region.emplace(device, nics, options, bytes, places, use);
    } catch (const Error& error) {
      return std::string(error.text());
    }
    region->Prove(device, places, rounds, kLoadBytes);
  }
  return {};
}

}  // namespace jaxhet::verbs
