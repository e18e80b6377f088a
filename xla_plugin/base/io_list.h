#ifndef XLA_PLUGIN_BASE_IO_LIST_H_
#define XLA_PLUGIN_BASE_IO_LIST_H_

#include <sys/uio.h>

#include <cstddef>
#include <span>
#include <string_view>
#include <vector>

namespace jaxhet {

// Bytes that lie in several places of memory, seen as one sequence. Does not own them.
class IoList {
 public:
  IoList() = default;
  explicit IoList(std::span<const iovec> entries) {
    for (const iovec& entry : entries) Add(entry.iov_base, entry.iov_len);
  }

  void Add(const void* data, size_t num_bytes);
  size_t num_bytes() const { return num_bytes_; }
  std::span<const iovec> entries() const { return entries_; }

  // The entries of [offset, offset + num_bytes), which must lie inside.
  std::vector<iovec> Cut(size_t offset, size_t num_bytes) const;
  // Copies `bytes` to or from there.
  void CopyIn(size_t offset, std::span<const std::byte> bytes) const;
  void CopyOut(size_t offset, std::span<std::byte> bytes) const;

 private:
  template <typename Visit>
  void ForEachEntry(size_t offset, size_t num_bytes, Visit visit) const;

  std::vector<iovec> entries_;  // none empty
  size_t num_bytes_ = 0;
};

// An iovec of bytes that are only read, or of a whole object.
inline iovec ToIovec(const void* data, size_t num_bytes) {
  return {.iov_base = const_cast<void*>(data), .iov_len = num_bytes};
}
template <typename T>
iovec ObjectIovec(const T& object) {
  return ToIovec(&object, sizeof object);
}

size_t NumBytes(std::span<const iovec> entries);

}  // namespace jaxhet

#endif  // XLA_PLUGIN_BASE_IO_LIST_H_
