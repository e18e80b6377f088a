#include "tests/softverbs/library/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "xla_plugin/base/checked.h"

namespace jaxhet::softverbs {
namespace {

uint64_t PageOffset(uint64_t offset) {
  return offset % static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

}  // namespace

Mr* Memory::Register(Pd& pd, void* address, size_t num_bytes, uint64_t iova, int access) {
  if (last_key_ == 0) last_key_ = static_cast<uint32_t>(getpid()) << 12;
  auto* const mr = new Mr({&pd});
  mr->context = pd.context;
  mr->pd = &pd;
  mr->addr = address;
  mr->memory = static_cast<std::byte*>(address);
  mr->length = num_bytes;
  mr->lkey = mr->rkey = mr->handle = ++last_key_;
  mr->iova = iova;
  mr->access = access;
  return mrs_[last_key_] = mr;
}

Mr* Memory::RegisterDmabuf(Pd& pd, int fd, uint64_t offset, size_t num_bytes, uint64_t iova,
                           int access) {
  // Memory of a device can't be mapped, but whoever copies it knows it by its address.
  const uint64_t before = PageOffset(offset);
  auto* address = reinterpret_cast<std::byte*>(iova);
  if (!copy) {
    void* const mapping = mmap(nullptr, num_bytes + before, PROT_READ | PROT_WRITE, MAP_SHARED, fd,
                               static_cast<off_t>(offset - before));
    if (mapping == MAP_FAILED) return nullptr;
    address = static_cast<std::byte*>(mapping) + before;
  }
  Mr* const mr = Register(pd, address, num_bytes, iova, access);
  mr->is_dmabuf = true;
  mr->is_mapped = !copy;
  return mr;
}

void Memory::Deregister(Mr* mr) {
  if (mr->is_mapped) {
    const uint64_t before = PageOffset(reinterpret_cast<uintptr_t>(mr->memory));
    munmap(mr->memory - before, mr->length + before);
  }
  mrs_.erase(mr->lkey);
  delete mr;
}

const Mr* Memory::Find(const ibv::Pd* pd, uint32_t key, uint64_t address, uint64_t num_bytes,
                       int access) const {
  const auto found = mrs_.find(key);
  if (found == mrs_.end()) return nullptr;
  const Mr& mr = *found->second;
  if (mr.pd != pd || (mr.access & access) != access || address < mr.iova) return nullptr;
  return InBounds(address - mr.iova, num_bytes, mr.length) ? &mr : nullptr;
}

std::vector<std::byte> Memory::Read(const Mr& mr, uint64_t address, size_t num_bytes) const {
  std::vector<std::byte> bytes(num_bytes);
  Copy(bytes.data(), mr.memory + (address - mr.iova), num_bytes);
  return bytes;
}

void Memory::Write(const Mr& mr, uint64_t address, std::span<const std::byte> bytes) const {
  Copy(mr.memory + (address - mr.iova), bytes.data(), bytes.size());
}

void Memory::Copy(void* to, const void* from, size_t num_bytes) const {
  if (num_bytes == 0) return;
  if (copy) return copy(to, from, num_bytes);
  std::memcpy(to, from, num_bytes);
}

}  // namespace jaxhet::softverbs
