#include "xla_plugin/net/verbs/memory.h"

#include <sys/mman.h>

#include <memory>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"
#include "xla_plugin/base/huge_pages.h"

namespace jaxhet::verbs {

NicMemory::NicMemory(NicList nics, std::span<std::byte> memory, int access)
    : nics_(nics.begin(), nics.end()) {
  for (const auto& nic : nics) regions_.emplace_back(nic->domain, memory, access);
}

NicMemory::NicMemory(NicList nics, std::span<std::byte> memory, const DmaBuf& dma_buf, int access)
    : nics_(nics.begin(), nics.end()) {
  for (const auto& nic : nics) {
    regions_.emplace_back(nic->domain, memory, dma_buf.fd.get(), dma_buf.offset, access);
  }
}

Staging::Staging(NicList nics, size_t num_slots, size_t slot_bytes, int access)
    : slot_bytes_(slot_bytes) {
  const size_t num_bytes = CheckedMultiply(num_slots, slot_bytes);
  void* const address =
      mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (address == MAP_FAILED) ThrowErrno("mmap");
  memory_ = {static_cast<std::byte*>(address), num_bytes};
  AdviseHugePages(memory_);
  madvise(address, num_bytes, MADV_DONTFORK);
  try {
    region_ = std::make_unique<NicMemory>(nics, memory_, access);
  } catch (const Error&) {
    munmap(address, num_bytes);
    throw;
  }
}

Staging::~Staging() {
  region_.reset();
  munmap(memory_.data(), memory_.size());
}

}  // namespace jaxhet::verbs
