#include "xla_plugin/net/seal.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <utility>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"

namespace jaxhet {
namespace {

constexpr std::array<std::string_view, 3> kNames = {"off", "auth", "full"};
constexpr std::string_view kNextKey = "jaxhet next key\x01";  // RFC 5869, HKDF-Expand, T(1)

const unsigned char* Bytes(std::span<const std::byte> bytes) {
  return reinterpret_cast<const unsigned char*>(bytes.data());
}
unsigned char* Bytes(std::span<std::byte> bytes) {
  return reinterpret_cast<unsigned char*>(bytes.data());
}

// `call` is the function of libcrypto that said so.
void Require(bool success, std::string_view call) {
  if (!success) Throw(ErrorCode::kTransport, "libcrypto: ", call, " failed");
}

}  // namespace

Encryption ParseEncryption(std::string_view name) {
  const auto* const found = std::ranges::find(kNames, name);
  if (found == kNames.end()) {
    Throw(ErrorCode::kUsage, "encryption '", name, "' is not off, auth or full");
  }
  return static_cast<Encryption>(found - kNames.begin());
}

std::string_view NameOf(Encryption encryption) {
  return kNames.at(static_cast<size_t>(encryption));
}

const CryptoApi& Crypto(Encryption encryption) {
  static const CryptoApi api = LoadCryptoFor(encryption);
  return api;
}

CryptoApi LoadCryptoFor(Encryption encryption, std::span<const char* const> names) {
  try {
    return LoadCrypto(names);
  } catch (const Error& error) {
    Throw(ErrorCode::kUsage, "JAXHET_ENCRYPTION=", NameOf(encryption),
          " needs OpenSSL's libcrypto on every host: ", error.text(),
          "; install OpenSSL 3 (Debian: libssl3), or set JAXHET_ENCRYPTION=off for the whole job");
  }
}

void RefuseSealing(Encryption encryption) {
  if (encryption == Encryption::kOff) return;
  Throw(ErrorCode::kTransport, "NICs can't encrypt what they read out of memory, and ",
        "JAXHET_ENCRYPTION is ", NameOf(encryption));
}

SealKey SealKey::FromHex(std::string_view digits) {
  SealKey key;
  bool is_valid = digits.size() == 2 * kNumBytes;
  for (size_t i = 0; is_valid && i < kNumBytes; ++i) {
    const char* const begin = digits.data() + 2 * i;
    is_valid = std::from_chars(begin, begin + 2, key.bytes_[i], 16).ptr == begin + 2;
  }
  if (!is_valid) Throw(ErrorCode::kUsage, "a key is not ", 2 * kNumBytes, " hexadecimal digits");
  key.is_set_ = true;
  return key;
}

SealKey::SealKey(SealKey&& other) noexcept { *this = std::move(other); }

SealKey& SealKey::operator=(SealKey&& other) noexcept {
  if (this == &other) return *this;
  bytes_ = other.bytes_;
  is_set_ = std::exchange(other.is_set_, false);
  explicit_bzero(other.bytes_.data(), kNumBytes);
  return *this;
}

SealKey::~SealKey() { explicit_bzero(bytes_.data(), kNumBytes); }

std::vector<SealKeys> KeysFor(Encryption encryption, size_t num_connections,
                              std::vector<SealKeys> given) {
  if (encryption == Encryption::kOff) {
    given.clear();
  } else if (given.size() != num_connections) {
    Throw(ErrorCode::kUsage, given.size(), " keys were made for ", num_connections,
          " connections, and JAXHET_ENCRYPTION is ", NameOf(encryption));
  }
  given.resize(num_connections);
  for (SealKeys& keys : given) keys.encryption = encryption;
  return given;
}

Seal::Seal(Direction direction, Encryption encryption, SealKey key, uint64_t records_per_key)
    : api_(Crypto(encryption)),
      direction_(direction),
      encryption_(encryption),
      key_(std::move(key)),
      records_per_key_(records_per_key),
      context_(api_.new_context(), {&api_}) {
  if (!key_) {
    Throw(ErrorCode::kUsage, "a connection has no key, and JAXHET_ENCRYPTION is ",
          NameOf(encryption));
  }
  Require(context_ != nullptr, api_.new_context.name());
  SetKey();
}

void Seal::SetKey() {
  const int encrypts = direction_ == Direction::kSeal ? 1 : 0;
  Require(api_.init(context_.get(), api_.aes_256_gcm(), nullptr, key_.bytes().data(), nullptr,
                    encrypts) == 1,
          api_.init.name());
}

void Seal::NextKey() {
  std::array<unsigned char, SealKey::kNumBytes> next{};
  Require(api_.hmac(api_.sha256(), key_.bytes().data(), SealKey::kNumBytes,
                    reinterpret_cast<const unsigned char*>(kNextKey.data()), kNextKey.size(),
                    next.data(), nullptr) != nullptr,
          api_.hmac.name());
  std::ranges::copy(next, key_.bytes().begin());
  explicit_bzero(next.data(), next.size());
  SetKey();
}

void Seal::SealNext(std::span<const std::byte> head, std::span<std::byte> body,
                    std::span<std::byte, kTagBytes> tag) {
  Begin(head, body);
  std::array<unsigned char, kTagBytes> rest{};
  int num_bytes = 0;
  Require(api_.finish(context_.get(), rest.data(), &num_bytes) == 1, api_.finish.name());
  Require(api_.control(context_.get(), evp::kGetTag, kTagBytes, tag.data()) == 1,
          api_.control.name());
}

void Seal::OpenNext(std::span<const std::byte> head, std::span<std::byte> body,
                    std::span<const std::byte, kTagBytes> tag) {
  const uint64_t record = num_records_;
  Begin(head, body);
  std::array<std::byte, kTagBytes> copy{};
  std::ranges::copy(tag, copy.begin());
  Require(api_.control(context_.get(), evp::kSetTag, kTagBytes, copy.data()) == 1,
          api_.control.name());
  std::array<unsigned char, kTagBytes> rest{};
  int num_bytes = 0;
  if (api_.finish(context_.get(), rest.data(), &num_bytes) == 1) return;
  Throw(ErrorCode::kTransport, "record ", record,
        " of a connection is not what it sealed (JAXHET_ENCRYPTION=", NameOf(encryption_),
        "): it was changed, repeated, reordered or cut on its way. Somebody between the hosts "
        "changes packets, or a device there is faulty");
}

void Seal::Begin(std::span<const std::byte> head, std::span<std::byte> body) {
  const uint64_t record = num_records_++ % records_per_key_;
  if (record == 0 && num_records_ > 1) NextKey();
  std::array<unsigned char, 12> nonce{};  // 96 bits, as GCM has it
  for (size_t i = 0; i < sizeof record; ++i) {
    nonce[i] = static_cast<unsigned char>(record >> (8 * i));
  }
  Require(api_.init(context_.get(), nullptr, nullptr, nullptr, nonce.data(), -1) == 1,
          api_.init.name());
  Authenticate(head);
  if (encryption_ == Encryption::kAuth) return Authenticate(body);
  if (body.empty()) return;
  int num_bytes = 0;
  Require(api_.update(context_.get(), Bytes(body), &num_bytes, Bytes(body),
                      CheckedCast<int>(body.size())) == 1,
          api_.update.name());
}

void Seal::Authenticate(std::span<const std::byte> bytes) {
  if (bytes.empty()) return;
  int num_bytes = 0;
  Require(api_.update(context_.get(), nullptr, &num_bytes, Bytes(bytes),
                      CheckedCast<int>(bytes.size())) == 1,
          api_.update.name());
}

size_t RecordWriter::Add(const IoList& bytes, size_t offset) {
  const size_t num_bytes = std::min(kMostRecordBytes, bytes.num_bytes() - offset);
  if (num_bytes == 0) return 0;
  const RecordInfo info{CheckedCast<uint32_t>(num_bytes)};
  record_.resize(sizeof info + num_bytes + Seal::kTagBytes);
  sent_ = 0;
  const auto head = std::span(record_).first<sizeof info>();
  const auto body = std::span(record_).subspan(sizeof info, num_bytes);
  std::memcpy(head.data(), &info, sizeof info);
  bytes.CopyOut(offset, body);
  seal_.SealNext(head, body, std::span(record_).last<Seal::kTagBytes>());
  return num_bytes;
}

size_t RecordReader::Take(std::span<const iovec> entries) {
  if (opened_.empty() && !OpenNext()) return 0;
  const IoList to(entries);
  const size_t num_bytes = std::min(to.num_bytes(), opened_.size());
  to.CopyIn(0, opened_.first(num_bytes));
  opened_ = opened_.subspan(num_bytes);
  return num_bytes;
}

bool RecordReader::OpenNext() {
  RecordInfo info{};
  const auto arrived = std::span(buffer_).subspan(begin_, end_ - begin_);
  if (arrived.size() < sizeof info) return false;
  std::memcpy(&info, arrived.data(), sizeof info);
  if (info.num_bytes == 0 || info.num_bytes > kMostRecordBytes) {
    Throw(ErrorCode::kTransport, "a record announces ", info.num_bytes,
          " bytes: it was changed on its way, or the peer does not encrypt; start every process "
          "with the same JAXHET_ENCRYPTION");
  }
  const size_t sealed_bytes = sizeof info + info.num_bytes + Seal::kTagBytes;
  if (arrived.size() < sealed_bytes) return false;
  const auto body = arrived.subspan(sizeof info, info.num_bytes);
  seal_.OpenNext(arrived.first<sizeof info>(), body,
                 arrived.first(sealed_bytes).last<Seal::kTagBytes>());
  begin_ += sealed_bytes;
  opened_ = body;
  return true;
}

iovec RecordReader::Room() {
  if (begin_ == end_) begin_ = end_ = 0;
  if (buffer_.size() - begin_ < kMostSealedBytes) {
    std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
  }
  return ToIovec(buffer_.data() + end_, buffer_.size() - end_);
}

}  // namespace jaxhet
