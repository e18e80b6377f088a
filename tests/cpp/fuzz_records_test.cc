#include <sys/epoll.h>
#include <sys/socket.h>

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "tests/cpp/fuzz.h"
#include "tests/cpp/testing.h"
#include "tests/cpp/world.h"
#include "xla_plugin/net/socket/socket.h"

// Fuzzer of sealed records: what somebody between two hosts can change.
namespace jaxhet::testing {
namespace {

constexpr size_t kMostTextBytes = 20'000;

// Text of which every seed seals the beginning.
const std::string& Text() {
  static const auto* const text = [] {
    auto* const made = new std::string;
    while (made->size() < kMostTextBytes) *made += StrCat("line ", made->size(), "\n");
    return made;
  }();
  return *text;
}

Socket SealedSocket(Fd fd, int own, Encryption encryption) {
  SealKeys keys = std::move(TestKeys(own, 1 - own, 1).front());
  keys.encryption = encryption;
  return Socket(std::move(fd), std::move(keys));
}

// Input: the encryption, then records of `sizes` bytes.
std::string Sealed(Encryption encryption, const std::vector<size_t>& sizes) {
  auto [own, peer] = UnixPair();
  Socket socket = SealedSocket(std::move(own), 0, encryption);
  size_t done = 0;
  for (const size_t size : sizes) {
    const iovec entry = ToIovec(Text().data() + done, size);
    done += socket.Write({&entry, 1});
  }
  std::string records(2 * kMostTextBytes, '\0');
  const ssize_t count = recv(peer.get(), records.data(), records.size(), MSG_DONTWAIT);
  EXPECT_GT(count, 0);
  records.resize(static_cast<size_t>(count));
  return BytesOf(encryption).append(records);
}

std::vector<std::string> RecordSeeds() {
  std::vector<std::string> seeds;
  for (const Encryption encryption : {Encryption::kAuth, Encryption::kFull}) {
    seeds.push_back(Sealed(encryption, {1, 100, 7}));
    seeds.push_back(Sealed(encryption, {kMostTextBytes / 2, 1'000}));
  }
  return seeds;
}

// Delivers nothing but the beginning of the sealed text, whatever arrives.
void ReadRecords(std::string_view input) {
  InputReader reader(input);
  const bool is_auth = reader.TakeBytes(sizeof(Encryption)) == BytesOf(Encryption::kAuth);
  auto [own, peer] = UnixPair();
  WriteSome(peer, reader.TakeBytes(input.size()));
  peer.Reset();
  Socket socket = SealedSocket(std::move(own), 1, is_auth ? Encryption::kAuth : Encryption::kFull);
  std::string delivered;
  std::array<char, 1'000> part{};
  const iovec entry = ToIovec(part.data(), part.size());
  socket.OnEvents(EPOLLIN);
  while (const size_t count = socket.Read({&entry, 1})) {
    delivered.append(part.data(), count);
    EXPECT_TRUE(Text().starts_with(delivered));
  }
}

[[maybe_unused]] const bool added_records = AddFuzzer({.name = "records",
                                                       .covers = {"xla_plugin/net/seal.cc"},
                                                       .seeds = &RecordSeeds,
                                                       .run = &ReadRecords});

}  // namespace
}  // namespace jaxhet::testing
