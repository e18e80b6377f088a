#include "tests/softverbs/library/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "xla_plugin/base/checked.h"

namespace jaxhet::softverbs {
namespace {

// Words arrive whole: programs poll them.
template <typename Word>
bool CopyWord(void* to, const void* from, size_t num_bytes) {
  if (num_bytes != sizeof(Word) || reinterpret_cast<uintptr_t>(to) % alignof(Word) != 0) {
    return false;
  }
  Word word = 0;
  std::memcpy(&word, from, sizeof word);
  std::atomic_ref(*static_cast<Word*>(to)).store(word, std::memory_order_release);
  return true;
}

uint64_t PageOffset(uint64_t offset) {
  return offset % static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

// Calls `visit(sge, offset in it, bytes)` for the parts of [offset, offset + num_bytes).
template <typename Visit>
void ForEachPart(std::span<const ibv::Sge> sges, uint64_t offset, uint64_t num_bytes, Visit visit) {
  uint64_t done = 0;
  for (const ibv::Sge& sge : sges) {
    if (offset >= sge.length) {
      offset -= sge.length;
      continue;
    }
    const uint64_t part = std::min(sge.length - offset, num_bytes - done);
    if (part == 0) return;
    visit(sge, sge.addr + offset, done, part);
    done += part;
    offset = 0;
  }
}

}  // namespace

Mr* Memory::Add(Pd& pd, std::unique_ptr<Mr> mr) {
  if (last_key_ == 0) last_key_ = static_cast<uint32_t>(getpid()) << 12;
  mr->context = pd.context;
  mr->pd = &pd;
  mr->lkey = mr->rkey = mr->handle = ++last_key_;
  ++pd.num_objects;
  return (mrs_[last_key_] = std::move(mr)).get();
}

Mr* Memory::Register(Pd& pd, void* address, size_t num_bytes, uint64_t iova, int access) {
  auto mr = std::make_unique<Mr>();
  mr->addr = address;
  mr->memory = static_cast<std::byte*>(address);
  mr->length = num_bytes;
  mr->iova = iova;
  mr->access = access;
  return Add(pd, std::move(mr));
}

Mr* Memory::RegisterDmabuf(Pd& pd, int fd, uint64_t offset, size_t num_bytes, uint64_t iova,
                           int access) {
  // Memory of a device can't be mapped, but whoever copies it knows it by its address.
  if (copy_ != nullptr) {
    Mr* const mr = Register(pd, reinterpret_cast<void*>(iova), num_bytes, iova, access);
    mr->is_dmabuf = true;
    return mr;
  }
  const uint64_t before = PageOffset(offset);
  void* const mapping = mmap(nullptr, num_bytes + before, PROT_READ | PROT_WRITE, MAP_SHARED, fd,
                             static_cast<off_t>(offset - before));
  if (mapping == MAP_FAILED) return nullptr;
  Mr* const mr = Register(pd, static_cast<std::byte*>(mapping) + before, num_bytes, iova, access);
  mr->is_dmabuf = mr->is_mapped = true;
  return mr;
}

void Memory::Deregister(Mr* mr) {
  if (mr->is_mapped) {
    const uint64_t before = PageOffset(reinterpret_cast<uintptr_t>(mr->memory));
    munmap(mr->memory - before, mr->length + before);
  }
  --static_cast<Pd*>(mr->pd)->num_objects;
  mrs_.erase(mr->lkey);
}

const Mr* Memory::Find(const ibv::Pd* pd, uint32_t key, uint64_t address, uint64_t num_bytes,
                       int access) const {
  const auto found = mrs_.find(key);
  if (found == mrs_.end()) return nullptr;
  const Mr& mr = *found->second;
  if (mr.pd != pd || (mr.access & access) != access || address < mr.iova) return nullptr;
  return InBounds(address - mr.iova, num_bytes, mr.length) ? &mr : nullptr;
}

bool Memory::Check(const ibv::Pd* pd, std::span<const ibv::Sge> sges, int access) const {
  return std::ranges::all_of(sges, [&](const ibv::Sge& sge) {
    return sge.length == 0 || Find(pd, sge.lkey, sge.addr, sge.length, access) != nullptr;
  });
}

void Memory::Gather(std::span<const ibv::Sge> sges, uint64_t offset,
                    std::span<std::byte> bytes) const {
  ForEachPart(sges, offset, bytes.size(),
              [&](const ibv::Sge& sge, uint64_t address, uint64_t done, uint64_t part) {
                Read(*mrs_.at(sge.lkey), address, bytes.subspan(done, part));
              });
}

void Memory::Scatter(std::span<const ibv::Sge> sges, uint64_t offset,
                     std::span<const std::byte> bytes) const {
  ForEachPart(sges, offset, bytes.size(),
              [&](const ibv::Sge& sge, uint64_t address, uint64_t done, uint64_t part) {
                Write(*mrs_.at(sge.lkey), address, bytes.subspan(done, part));
              });
}

void Memory::Read(const Mr& mr, uint64_t address, std::span<std::byte> bytes) const {
  Copy(bytes.data(), mr.memory + (address - mr.iova), bytes.size());
}

void Memory::Write(const Mr& mr, uint64_t address, std::span<const std::byte> bytes) const {
  const Damage harm = bytes.empty() ? Damage::kNone : damage(mr);
  if (harm == Damage::kLost) return;
  std::byte* const to = mr.memory + (address - mr.iova);
  if (harm == Damage::kNone) return Copy(to, bytes.data(), bytes.size());
  std::vector<std::byte> wrong(bytes.begin(), bytes.end());
  wrong[wrong.size() / 2] ^= std::byte{0x10};
  Copy(to, wrong.data(), wrong.size());
}

void Memory::Copy(void* to, const void* from, size_t num_bytes) const {
  if (num_bytes == 0) return;
  if (copy_ != nullptr) return copy_(to, from, num_bytes);
  if (CopyWord<uint64_t>(to, from, num_bytes) || CopyWord<uint32_t>(to, from, num_bytes)) return;
  std::memcpy(to, from, num_bytes);
}

}  // namespace jaxhet::softverbs
