#ifndef XLA_PLUGIN_BASE_HUGE_PAGES_H_
#define XLA_PLUGIN_BASE_HUGE_PAGES_H_

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace jaxhet {

// Asks for huge pages under a large buffer that is about to be filled. XLA's large buffers are
// fresh memory in every execution, and filling 4 KiB pages takes four times as long as the copy.
inline void AdviseHugePages(std::span<std::byte> buffer) {
  constexpr uintptr_t kHugePage = uintptr_t{2} << 20;
  const auto address = reinterpret_cast<uintptr_t>(buffer.data());
  const uintptr_t begin = (address + kHugePage - 1) & ~(kHugePage - 1);
  const uintptr_t end = (address + buffer.size()) & ~(kHugePage - 1);
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

}  // namespace jaxhet

#endif  // XLA_PLUGIN_BASE_HUGE_PAGES_H_
