#include "xla_plugin/transport/verbs/device_region.h"

#include <sys/random.h>

#include <utility>
#include <vector>

#include "xla_plugin/base/error.h"
#include "xla_plugin/device/proof.h"

namespace jaxhet::verbs {
namespace {

// To prove that it writes, and to flush, a NIC does as if it were a peer's.
constexpr int kReadAndWriteAccess =
    ibv::kAccessLocalWrite | ibv::kAccessRemoteWrite | ibv::kAccessRemoteRead;
constexpr int kReadAccess = 0;

std::vector<std::byte> RandomProof(size_t num_bytes) {
  std::vector<std::byte> proof(num_bytes);
  if (std::cmp_not_equal(getrandom(proof.data(), num_bytes, 0), num_bytes)) ThrowErrno("getrandom");
  return proof;
}

}  // namespace

DeviceRegion::DeviceRegion(Device& device, NicList nics, const Options& options,
                           std::span<std::byte> memory,
                           std::span<const std::span<std::byte>> places, Use use)
    : NicMemory(nics) {
  const int access = use == Use::kRead ? kReadAccess : kReadAndWriteAccess;
  for (const auto& nic : nics) loopbacks_.emplace_back(nic, options);
  std::string refusals;
  for (const auto& [way, register_memory] :
       {std::pair<std::string_view, RegisterFunction>{"dma-buf", &DeviceRegion::RegisterDmaBuf},
        {"peer memory", &DeviceRegion::RegisterPeerMemory}}) {
    try {
      (this->*register_memory)(device, memory, access);
      for (size_t nic = 0; nic < nics.size(); ++nic) {
        for (const auto place : places) {
          ProveRead(device, nic, place);
          if (use == Use::kReadAndWrite) ProveWrite(device, nic, place);
        }
      }
      way_ = way;
      if (use == Use::kRead) loopbacks_.clear();
      return;
    } catch (const Error& error) {
      Deregister();
      refusals += StrCat(refusals.empty() ? "" : "; ", way, ": ", error.text());
    }
  }
  throw Error(ErrorCode::kTransport, refusals);
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

// Proves twice: the second write would expose a NIC that still sends the older bytes.
void DeviceRegion::ProveRead(Device& device, size_t nic, std::span<std::byte> place) {
  for (int i = 0; i < 2; ++i) {
    const std::vector<std::byte> proof = RandomProof(place.size());
    std::vector<std::byte> seen(proof.size());
    WriteProof(device, place.data(), proof);
    loopbacks_[nic].Send(region(nic), reinterpret_cast<uint64_t>(place.data()), seen);
    if (seen == proof) continue;
    Throw(ErrorCode::kTransport, nics()[nic]->info.name, " read stale data after ",
          device.info().ToString(), " wrote to its memory: the NIC's reads are not coherent here");
  }
}

// Proves twice: the second write would expose a device that still reads the older bytes.
void DeviceRegion::ProveWrite(Device& device, size_t nic, std::span<std::byte> place) {
  for (int i = 0; i < 2; ++i) {
    const std::vector<std::byte> proof = RandomProof(place.size());
    const auto address = reinterpret_cast<uint64_t>(place.data());
    loopbacks_[nic].Write(region(nic), address, proof);
    loopbacks_[nic].Flush(region(nic), address);
    if (HasProof(device, place.data(), proof)) continue;
    Throw(ErrorCode::kTransport, device.info().ToString(), " does not see what ",
          nics()[nic]->info.name, " wrote to its memory: the NIC's writes are not coherent here");
  }
}

void DeviceRegion::Flush(uint64_t address, size_t nic) {
  try {
    loopbacks_[nic].Flush(region(nic), address);
  } catch (const Error&) {
    loopbacks_[nic].Flush(region(nic), address);  // over a new queue pair
  }
}

}  // namespace jaxhet::verbs
