#ifndef XLA_PLUGIN_NET_SOCKET_RECORDS_H_
#define XLA_PLUGIN_NET_SOCKET_RECORDS_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "xla_plugin/base/io_list.h"
#include "xla_plugin/net/seal.h"

namespace jaxhet {

// A stream of bytes travels as sealed records: a RecordInfo, `num_bytes` bytes, and a tag over
// both.
struct RecordInfo {
  uint32_t num_bytes;
};

inline constexpr size_t kMostRecordBytes = size_t{64} << 10;
inline constexpr size_t kMostSealedBytes = sizeof(RecordInfo) + kMostRecordBytes + Seal::kTagBytes;

// One direction of a stream, at the end that sends. Holds one record, until it is sent.
class RecordWriter {
 public:
  RecordWriter(Encryption encryption, SealKey key)
      : seal_(Seal::Direction::kSeal, encryption, std::move(key)) {}

  // Seals one record of what `bytes` has from `offset` on; returns the number of bytes that are in
  // it. Nothing may be unsent.
  size_t Add(const IoList& bytes, size_t offset);
  std::span<const std::byte> unsent() const { return std::span(record_).subspan(sent_); }
  void Sent(size_t num_bytes) { sent_ += num_bytes; }

 private:
  Seal seal_;
  std::vector<std::byte> record_;
  size_t sent_ = 0;
};

// The same, at the end that receives.
class RecordReader {
 public:
  RecordReader(Encryption encryption, SealKey key)
      : seal_(Seal::Direction::kOpen, encryption, std::move(key)), buffer_(4 * kMostSealedBytes) {}

  // Copies what has arrived and was verified to `entries`; returns the number of bytes, 0 if more
  // must arrive first. Throws TransportError for a record that was not sealed next.
  size_t Take(std::span<const iovec> entries);
  // After Take() has returned 0: memory for the bytes that arrive, and the number of those that
  // did.
  iovec Room();
  void Arrived(size_t num_bytes) { end_ += num_bytes; }

  // Verified bytes are left.
  bool has_bytes() const { return !opened_.empty(); }

 private:
  bool OpenNext();

  Seal seal_;
  std::vector<std::byte> buffer_;
  size_t begin_ = 0;  // first byte that has arrived and is not open
  size_t end_ = 0;
  std::span<std::byte> opened_;  // in the buffer, before `begin_`
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_NET_SOCKET_RECORDS_H_
