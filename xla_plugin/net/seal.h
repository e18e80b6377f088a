#ifndef XLA_PLUGIN_NET_SEAL_H_
#define XLA_PLUGIN_NET_SEAL_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "xla_plugin/base/io_list.h"
#include "xla_plugin/base/libcrypto.h"

namespace jaxhet {

// Protection of the bytes of a TCP connection after its handshake.
enum class Encryption {
  kOff,   // nothing
  kAuth,  // AES-256-GMAC: nobody can change, repeat, reorder or drop a part of it
  kFull,  // AES-256-GCM: nobody can read it, either
};

// Throws UsageError, which lists the names, for one that is unknown.
Encryption ParseEncryption(std::string_view name);
std::string_view NameOf(Encryption encryption);

// Throws UsageError with the reason if this machine can't encrypt. The first has loaded it once.
const CryptoApi& Crypto(Encryption encryption);
CryptoApi LoadCryptoFor(Encryption encryption,
                        std::span<const char* const> names = kCryptoLibraries);

// For paths that can't be sealed; throws TransportError if the job is to be.
void RefuseSealing(Encryption encryption);

// The key of one direction of one connection. It moves and has no copies, since two seals of one
// key would use a nonce twice.
class SealKey {
 public:
  static constexpr size_t kNumBytes = 32;

  SealKey() = default;
  // 64 hexadecimal digits; throws UsageError for others.
  static SealKey FromHex(std::string_view digits);
  SealKey(SealKey&& other) noexcept;
  SealKey& operator=(SealKey&& other) noexcept;
  ~SealKey();

  explicit operator bool() const { return is_set_; }
  std::span<unsigned char, kNumBytes> bytes() { return bytes_; }

 private:
  std::array<unsigned char, kNumBytes> bytes_{};
  bool is_set_ = false;
};

// Keys of a connection, agreed on in the handshake.
struct SealKeys {
  Encryption encryption = Encryption::kOff;
  SealKey send;
  SealKey receive;
};

// `given` for a job that encrypts in this way, or as many that seal nothing. Throws UsageError if
// a connection has none.
std::vector<SealKeys> KeysFor(Encryption encryption, size_t num_connections,
                              std::vector<SealKeys> given);

// One direction of a connection: seals its records one after the other, or opens them in the same
// order. Record i of a key has i as its nonce, so that a record counts in its place only. After
// `records_per_key` records, HMAC-SHA-256 makes the next key of the one before.
class Seal {
 public:
  static constexpr size_t kTagBytes = 16;
  // Records have at most 2^16 bytes. RFC 8446, part 5.5, allows 2^24.5 records of 2^14 for one key.
  static constexpr uint64_t kRecordsPerKey = uint64_t{1} << 22;

  enum class Direction { kOpen, kSeal };

  // `encryption` is not kOff. Throws UsageError if this machine has no libcrypto, or without a key.
  Seal(Direction direction, Encryption encryption, SealKey key,
       uint64_t records_per_key = kRecordsPerKey);

  // Seals the next record: `body` is encrypted in place (kFull) or stays (kAuth). `head` stays.
  void SealNext(std::span<const std::byte> head, std::span<std::byte> body,
                std::span<std::byte, kTagBytes> tag);
  // Inverse of SealNext(). Throws TransportError if this is not the record that was sealed next;
  // `body` is undefined then.
  void OpenNext(std::span<const std::byte> head, std::span<std::byte> body,
                std::span<const std::byte, kTagBytes> tag);

 private:
  struct FreeContext {
    const CryptoApi* api;
    void operator()(evp::CipherContext* context) const { api->free_context(context); }
  };

  void SetKey();
  void NextKey();
  void Begin(std::span<const std::byte> head, std::span<std::byte> body);
  void Authenticate(std::span<const std::byte> bytes);

  const CryptoApi& api_;
  Direction direction_;
  Encryption encryption_;
  SealKey key_;
  uint64_t records_per_key_;
  uint64_t num_records_ = 0;  // sum over all keys
  std::unique_ptr<evp::CipherContext, FreeContext> context_;
};

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

#endif  // XLA_PLUGIN_NET_SEAL_H_
