#ifndef TESTS_SOFTVERBS_LIBRARY_MEMORY_H_
#define TESTS_SOFTVERBS_LIBRARY_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "tests/softverbs/library/objects.h"

namespace jaxhet::softverbs {

// How memory is written and read; the program may give its own for memory that is not the host's.
using CopyFunction = void (*)(void* to, const void* from, size_t num_bytes);

enum class Damage : uint8_t { kNone, kLost, kGarbled };

// The registered memory of a process. lkey and rkey are one number, which is never given twice.
class Memory {
 public:
  // `access` as in verbs; `iova` is the address by which requests name the first byte.
  Mr* Register(Pd& pd, void* address, size_t num_bytes, uint64_t iova, int access);
  // Maps the file; nullptr and errno if it can't be.
  Mr* RegisterDmabuf(Pd& pd, int fd, uint64_t offset, size_t num_bytes, uint64_t iova, int access);
  void Deregister(Mr* mr);
  size_t size() const { return mrs_.size(); }
  void set_copy(CopyFunction copy) { copy_ = copy; }

  // The memory region if [address, address + num_bytes) lies in it and it allows `access`.
  const Mr* Find(const ibv::Pd* pd, uint32_t key, uint64_t address, uint64_t num_bytes,
                 int access) const;

  // All sges must pass Find(); false if one does not.
  bool Check(const ibv::Pd* pd, std::span<const ibv::Sge> sges, int access) const;
  // Copies bytes.size() bytes from, or to, `offset` of the sges, which passed Check().
  void Gather(std::span<const ibv::Sge> sges, uint64_t offset, std::span<std::byte> bytes) const;
  void Scatter(std::span<const ibv::Sge> sges, uint64_t offset,
               std::span<const std::byte> bytes) const;

  void Read(const Mr& mr, uint64_t address, std::span<std::byte> bytes) const;
  void Write(const Mr& mr, uint64_t address, std::span<const std::byte> bytes) const;

  // Asked before each write.
  std::function<Damage(const Mr&)> damage = [](const Mr&) { return Damage::kNone; };

 private:
  void Copy(void* to, const void* from, size_t num_bytes) const;
  Mr* Add(Pd& pd, std::unique_ptr<Mr> mr);

  std::map<uint32_t, std::unique_ptr<Mr>> mrs_;
  uint32_t last_key_ = 0;
  CopyFunction copy_ = nullptr;
};

}  // namespace jaxhet::softverbs

#endif  // TESTS_SOFTVERBS_LIBRARY_MEMORY_H_
