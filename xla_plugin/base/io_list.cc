#include "xla_plugin/base/io_list.h"

#include <algorithm>
#include <cstring>

namespace jaxhet {
namespace {

void RemovePrefix(iovec& entry, size_t num_bytes) {
  entry.iov_base = static_cast<std::byte*>(entry.iov_base) + num_bytes;
  entry.iov_len -= num_bytes;
}

}  // namespace

void IoList::Add(const void* data, size_t num_bytes) {
  if (num_bytes == 0) return;
  entries_.push_back(ToIovec(data, num_bytes));
  num_bytes_ += num_bytes;
}

template <typename Visit>
void IoList::ForEachEntry(size_t offset, size_t num_bytes, Visit visit) const {
  for (iovec entry : entries_) {
    if (num_bytes == 0) break;
    const size_t skipped = std::min(offset, entry.iov_len);
    offset -= skipped;
    RemovePrefix(entry, skipped);
    entry.iov_len = std::min(entry.iov_len, num_bytes);
    num_bytes -= entry.iov_len;
    if (entry.iov_len > 0) visit(entry);
  }
}

std::vector<iovec> IoList::Cut(size_t offset, size_t num_bytes) const {
  std::vector<iovec> cut;
  ForEachEntry(offset, num_bytes, [&](const iovec& entry) { cut.push_back(entry); });
  return cut;
}

void IoList::CopyIn(size_t offset, std::span<const std::byte> bytes) const {
  const std::byte* from = bytes.data();
  ForEachEntry(offset, bytes.size(), [&](const iovec& entry) {
    std::memcpy(entry.iov_base, from, entry.iov_len);
    from += entry.iov_len;
  });
}

void IoList::CopyOut(size_t offset, std::span<std::byte> bytes) const {
  std::byte* to = bytes.data();
  ForEachEntry(offset, bytes.size(), [&](const iovec& entry) {
    std::memcpy(to, entry.iov_base, entry.iov_len);
    to += entry.iov_len;
  });
}

size_t NumBytes(std::span<const iovec> entries) {
  size_t num_bytes = 0;
  for (const iovec& entry : entries) num_bytes += entry.iov_len;
  return num_bytes;
}

}  // namespace jaxhet
