#include "xla_plugin/base/io_list.h"

#include <algorithm>
#include <cstring>

namespace jaxhet {
namespace {

void RemovePrefix(iovec& piece, size_t num_bytes) {
  piece.iov_base = static_cast<std::byte*>(piece.iov_base) + num_bytes;
  piece.iov_len -= num_bytes;
}

}  // namespace

void IoList::Add(const void* data, size_t num_bytes) {
  if (num_bytes == 0) return;
  pieces_.push_back(ToIovec(data, num_bytes));
  num_bytes_ += num_bytes;
}

template <typename Visit>
void IoList::ForEachPiece(size_t offset, size_t num_bytes, Visit visit) const {
  for (iovec piece : pieces_) {
    if (num_bytes == 0) break;
    const size_t skipped = std::min(offset, piece.iov_len);
    offset -= skipped;
    RemovePrefix(piece, skipped);
    piece.iov_len = std::min(piece.iov_len, num_bytes);
    num_bytes -= piece.iov_len;
    if (piece.iov_len > 0) visit(piece);
  }
}

std::vector<iovec> IoList::Cut(size_t offset, size_t num_bytes) const {
  std::vector<iovec> cut;
  ForEachPiece(offset, num_bytes, [&](const iovec& piece) { cut.push_back(piece); });
  return cut;
}

void IoList::CopyIn(size_t offset, std::span<const std::byte> bytes) const {
  const std::byte* from = bytes.data();
  ForEachPiece(offset, bytes.size(), [&](const iovec& piece) {
    std::memcpy(piece.iov_base, from, piece.iov_len);
    from += piece.iov_len;
  });
}

void IoList::CopyOut(size_t offset, std::span<std::byte> bytes) const {
  std::byte* to = bytes.data();
  ForEachPiece(offset, bytes.size(), [&](const iovec& piece) {
    std::memcpy(to, piece.iov_base, piece.iov_len);
    to += piece.iov_len;
  });
}

size_t NumBytes(std::span<const iovec> pieces) {
  size_t num_bytes = 0;
  for (const iovec& piece : pieces) num_bytes += piece.iov_len;
  return num_bytes;
}

size_t CopyPieces(std::span<const iovec> to, std::span<const iovec> from) {
  size_t copied = 0;
  iovec target{};
  iovec source{};
  while (true) {
    for (; target.iov_len == 0; to = to.subspan(1)) {
      if (to.empty()) return copied;
      target = to.front();
    }
    for (; source.iov_len == 0; from = from.subspan(1)) {
      if (from.empty()) return copied;
      source = from.front();
    }
    const size_t num_bytes = std::min(target.iov_len, source.iov_len);
    std::memcpy(target.iov_base, source.iov_base, num_bytes);
    RemovePrefix(target, num_bytes);
    RemovePrefix(source, num_bytes);
    copied += num_bytes;
  }
}

}  // namespace jaxhet
