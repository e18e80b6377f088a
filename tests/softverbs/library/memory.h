#ifndef TESTS_SOFTVERBS_LIBRARY_MEMORY_H_
#define TESTS_SOFTVERBS_LIBRARY_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <vector>

#include "tests/softverbs/library/objects.h"

namespace jaxhet::softverbs {

// The registered memory of a process. lkey and rkey are one number, which is never given twice.
class Memory {
 public:
  // `access` as in verbs; `iova` is the address by which requests name the first byte.
  Mr* Register(Pd& pd, void* address, size_t num_bytes, uint64_t iova, int access);
  // Maps the file; nullptr and errno if it can't be.
  Mr* RegisterDmabuf(Pd& pd, int fd, uint64_t offset, size_t num_bytes, uint64_t iova, int access);
  void Deregister(Mr* mr);

  // The memory region if [address, address + num_bytes) lies in it and it allows `access`.
  const Mr* Find(const ibv::Pd* pd, uint32_t key, uint64_t address, uint64_t num_bytes,
                 int access) const;
  std::vector<std::byte> Read(const Mr& mr, uint64_t address, size_t num_bytes) const;
  void Write(const Mr& mr, uint64_t address, std::span<const std::byte> bytes) const;

  // How memory is copied that is not the host's; empty: as the host's.
  std::function<void(void* to, const void* from, size_t num_bytes)> copy;

 private:
  void Copy(void* to, const void* from, size_t num_bytes) const;

  std::map<uint32_t, Mr*> mrs_;
  uint32_t last_key_ = 0;
};

}  // namespace jaxhet::softverbs

#endif  // TESTS_SOFTVERBS_LIBRARY_MEMORY_H_
