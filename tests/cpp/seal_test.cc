#include "xla_plugin/net/seal.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cpp/testing.h"
#include "tests/cpp/world.h"

// Attacks on sealed records by somebody between two hosts.
namespace jaxhet::testing {
namespace {

using ::testing::HasSubstr;

using Bytes = std::vector<std::byte>;

constexpr std::array kModes = {Encryption::kAuth, Encryption::kFull};

SealKey KeyOf(char digit) { return SealKey::FromHex(std::string(2 * SealKey::kNumBytes, digit)); }

std::string Text(size_t num_bytes) {
  std::string text(num_bytes, '\0');
  for (size_t i = 0; i < num_bytes; ++i) text[i] = static_cast<char>('a' + i * 7 % 26);
  return text;
}

std::string AsText(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// Sealed records of `text`.
std::vector<Bytes> Records(RecordWriter& writer, std::string_view text) {
  IoList list;
  list.Add(text.data(), text.size() / 2);
  list.Add(text.data() + text.size() / 2, text.size() - text.size() / 2);
  std::vector<Bytes> records;
  for (size_t done = 0; done < text.size();) {
    done += writer.Add(list, done);
    records.emplace_back(writer.unsent().begin(), writer.unsent().end());
    writer.Sent(records.back().size());
    EXPECT_TRUE(writer.unsent().empty());
  }
  return records;
}

std::string TakeAll(RecordReader& reader) {
  std::string text;
  std::array<char, 1000> part{};
  const iovec entry = ToIovec(part.data(), part.size());
  while (const size_t num_bytes = reader.Take({&entry, 1})) text.append(part.data(), num_bytes);
  return text;
}

// Plain bytes from the reader after `bytes` have arrived, `step` at a time.
std::string Receive(RecordReader& reader, std::span<const std::byte> bytes,
                    size_t step = SIZE_MAX) {
  std::string text = TakeAll(reader);
  while (!bytes.empty()) {
    const iovec room = reader.Room();
    const auto part = bytes.first(std::min({bytes.size(), room.iov_len, step}));
    std::memcpy(room.iov_base, part.data(), part.size());
    reader.Arrived(part.size());
    bytes = bytes.subspan(part.size());
    text += TakeAll(reader);
  }
  return text;
}

struct Ends {
  explicit Ends(Encryption mode) : writer(mode, KeyOf('1')), reader(mode, KeyOf('1')) {}
  RecordWriter writer;
  RecordReader reader;
};

constexpr std::string_view kRefusal = "is not what it sealed (JAXHET_ENCRYPTION=";

TEST(SealTest, CipherIsAesGcm) {
  // Test cases 13 and 14 of "The Galois/Counter Mode of Operation (GCM)", McGrew and Viega.
  constexpr std::string_view kEmptyTag =
      "\x53\x0f\x8a\xfb\xc7\x45\x36\xb9\xa9\x63\xb4\xf1\xc4\xcb\x73\x8b";
  constexpr std::string_view kText =
      "\xce\xa7\x40\x3d\x4d\x60\x6b\x6e\x07\x4e\xc5\xd3\xba\xf3\x9d\x18";
  constexpr std::string_view kTag =
      "\xd0\xd1\xc8\xa7\x99\x99\x6b\xf0\x26\x5b\x98\xb5\xd4\x8a\xb9\x19";
  std::array<std::byte, 16> body{};
  std::array<std::byte, Seal::kTagBytes> tag{};
  Seal(Seal::Direction::kSeal, Encryption::kFull, KeyOf('0')).SealNext({}, {}, tag);
  EXPECT_EQ(AsText(tag), std::string(kEmptyTag));
  Seal(Seal::Direction::kSeal, Encryption::kFull, KeyOf('0')).SealNext({}, body, tag);
  EXPECT_EQ(AsText(body), std::string(kText));
  EXPECT_EQ(AsText(tag), std::string(kTag));
}

TEST(SealTest, RecordsRoundTrip) {
  for (const Encryption mode : kModes) {
    Ends ends(mode);
    for (const size_t num_bytes : {size_t{0}, size_t{1}, size_t{7}, kMostRecordBytes - 1,
                                   kMostRecordBytes, kMostRecordBytes + 1, 5 * kMostRecordBytes}) {
      const std::string text = Text(num_bytes);
      Bytes all;
      for (const Bytes& record : Records(ends.writer, text)) {
        all.insert(all.end(), record.begin(), record.end());
      }
      EXPECT_EQ(Receive(ends.reader, all, num_bytes < 100 ? 1 : 50'001), text);
    }
  }
}

TEST(SealTest, RefusesEachChangedBit) {
  for (const Encryption mode : kModes) {
    Ends sender(mode);
    const std::vector<Bytes> records = {Records(sender.writer, Text(30)).at(0),
                                        Records(sender.writer, Text(kMostRecordBytes)).at(0)};
    for (size_t bit = 0; bit < 8 * records[0].size(); ++bit) {
      Bytes changed = records[0];
      changed[bit / 8] ^= std::byte{1} << (bit % 8);
      // A length that was changed makes the reader wait for more: the next record.
      changed.insert(changed.end(), records[1].begin(), records[1].end());
      Ends receiver(mode);
      std::string got;
      const std::string error = ThrownText([&] { got = Receive(receiver.reader, changed); });
      EXPECT_TRUE(error.find(kRefusal) != std::string::npos ||
                  error.find("a record announces ") != std::string::npos);
      EXPECT_EQ(got, std::string());
    }
  }
}

TEST(SealTest, RefusesRepeatedReorderedAndDroppedRecords) {
  const std::vector<std::vector<size_t>> orders = {{0, 0}, {1}, {0, 2}, {0, 1, 0}, {0, 1, 1}};
  for (const Encryption mode : kModes) {
    for (const auto& order : orders) {
      Ends ends(mode);
      std::vector<Bytes> records;
      for (size_t i = 0; i < 3; ++i) records.push_back(Records(ends.writer, Text(50)).at(0));
      for (size_t i = 0; i + 1 < order.size(); ++i) {
        EXPECT_EQ(Receive(ends.reader, records[order[i]]), Text(50));
      }
      const auto last = [&] { Receive(ends.reader, records[order.back()]); };
      EXPECT_THAT(ThrownText(last), HasSubstr(kRefusal));
      EXPECT_THAT(ThrownText(last), HasSubstr(kRefusal));  // and nothing after it counts
    }
  }
}

TEST(SealTest, RefusesOtherConnectionsDirectionsAndModes) {
  for (const Encryption mode : kModes) {
    RecordWriter writer(mode, KeyOf('1'));
    const Bytes record = Records(writer, Text(40)).at(0);
    RecordReader other_key(mode, KeyOf('2'));
    RecordReader other_mode(mode == Encryption::kFull ? Encryption::kAuth : Encryption::kFull,
                            KeyOf('1'));
    EXPECT_THAT(ThrownText([&] { Receive(other_key, record); }), HasSubstr(kRefusal));
    EXPECT_THAT(ThrownText([&] { Receive(other_mode, record); }), HasSubstr(kRefusal));
  }
}

TEST(SealTest, RefusesAChangedHead) {
  for (const Encryption mode : kModes) {
    Seal sealing(Seal::Direction::kSeal, mode, KeyOf('1'));
    Seal opening(Seal::Direction::kOpen, mode, KeyOf('1'));
    std::array<std::byte, 4> head{};
    std::array<std::byte, 20> body{};
    std::array<std::byte, Seal::kTagBytes> tag{};
    sealing.SealNext(head, body, tag);
    head[0] = std::byte{1};
    EXPECT_THAT(ThrownText([&] { opening.OpenNext(head, body, tag); }), HasSubstr(kRefusal));
  }
}

// A nonce used twice under one key would make equal texts equal records.
TEST(SealTest, KeyChangesBeforeANonceComesTwice) {
  constexpr uint64_t kLimit = 3;
  for (const Encryption mode : kModes) {
    Seal sealing(Seal::Direction::kSeal, mode, KeyOf('1'), kLimit);
    Seal opening(Seal::Direction::kOpen, mode, KeyOf('1'), kLimit);
    Seal late(Seal::Direction::kOpen, mode, KeyOf('1'), kLimit + 1);
    std::set<std::string> tags;
    for (uint64_t i = 0; i < 4 * kLimit; ++i) {
      const std::string text = Text(20);
      std::array<std::byte, 20> body{};
      std::memcpy(body.data(), text.data(), body.size());
      std::array<std::byte, Seal::kTagBytes> tag{};
      sealing.SealNext({}, body, tag);
      tags.insert(AsText(tag));
      auto copy = body;
      if (i < kLimit) late.OpenNext({}, copy, tag);
      if (i == kLimit) {
        EXPECT_THAT(ThrownText([&] { late.OpenNext({}, copy, tag); }), HasSubstr(kRefusal));
      }
      opening.OpenNext({}, body, tag);
      EXPECT_EQ(AsText(body), text);
    }
    EXPECT_EQ(tags.size(), size_t{4 * kLimit});
  }
}

TEST(SealTest, KeysAreUsedOnce) {
  SealKey key = KeyOf('1');
  const RecordWriter writer(Encryption::kFull, std::move(key));
  EXPECT_FALSE(key);  // NOLINT(bugprone-use-after-move): that is the question
  const std::string error =
      ThrownText([&] { const RecordWriter second(Encryption::kFull, std::move(key)); });
  EXPECT_THAT(error, HasSubstr("a connection has no key, and JAXHET_ENCRYPTION is full"));
  // NOLINTNEXTLINE(clang-analyzer-cplusplus.Move): that is the question, too
  EXPECT_TRUE(std::ranges::all_of(key.bytes(), [](unsigned char byte) { return byte == 0; }));
}

TEST(SealTest, EncryptionSaysWhatIsWrong) {
  EXPECT_THAT(ThrownText([] { ParseEncryption("tls"); }),
              HasSubstr("UsageError: encryption 'tls' is not off, auth or full"));
  EXPECT_THAT(ThrownText([] { SealKey::FromHex("12"); }),
              HasSubstr("a key is not 64 hexadecimal digits"));
  EXPECT_THAT(ThrownText([] { SealKey::FromHex(std::string(64, 'g')); }),
              HasSubstr("a key is not 64"));
  EXPECT_THAT(ThrownText([] { KeysFor(Encryption::kAuth, 3, {}); }),
              HasSubstr("0 keys were made for 3 connections, and JAXHET_ENCRYPTION is auth"));
  EXPECT_EQ(KeysFor(Encryption::kOff, 3, {}).size(), size_t{3});
  EXPECT_THAT(
      ThrownText([] { RefuseSealing(Encryption::kFull); }),
      HasSubstr("NICs can't encrypt what they read out of memory, and JAXHET_ENCRYPTION is full"));
  RefuseSealing(Encryption::kOff);
}

TEST(SealTest, MissingLibcryptoIsNamed) {
  const std::array names = {"libcrypto-that-is-not-there.so"};
  const std::string error = ThrownText([&] { LoadCryptoFor(Encryption::kFull, names); });
  EXPECT_THAT(error,
              HasSubstr("UsageError: JAXHET_ENCRYPTION=full needs OpenSSL's libcrypto on every"));
  EXPECT_THAT(error, HasSubstr("libcrypto-that-is-not-there.so"));
  EXPECT_THAT(error, HasSubstr("or set JAXHET_ENCRYPTION=off for the whole job"));
  const std::array other = {"libm.so.6"};
  EXPECT_THAT(ThrownText([&] { LoadCryptoFor(Encryption::kAuth, other); }),
              HasSubstr("libm.so.6 has no OpenSSL_version: it is older than jaxhet needs"));
}

TEST(SealTest, RdmaAloneIsRefusedInWords) {
  WorldOptions options{.transports = {"verbs"}};
  options.engine.encryption = "auth";
  auto ends = ConnectAll(2);
  const auto first = MakeEngine(0, options, std::move(ends[0]));
  const auto second = MakeEngine(1, options, std::move(ends[1]));
  std::thread other([&] { EXPECT_THROW(second->Connect(kLong), Error); });
  const std::string error = ThrownText([&] { first->Connect(kLong); });
  other.join();
  EXPECT_THAT(error, HasSubstr("no transport reaches it"));
  EXPECT_THAT(error, HasSubstr("verbs: NICs can't encrypt what they read out of memory, and "
                               "JAXHET_ENCRYPTION is auth"));
}

}  // namespace
}  // namespace jaxhet::testing
