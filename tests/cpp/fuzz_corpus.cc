#include <array>

#include "tests/cpp/fuzz.h"

namespace jaxhet::testing {
namespace {

struct Entry {
  std::string_view fuzzer;
  std::string_view hex;
};

// Attacks, and inputs that once broke something. A finding is added with the digits that its
// report prints.
constexpr std::array<Entry, 5> kCorpus = {{
    // A body of 2^64 - 1 bytes.
    {"stream", "4a58483302000000ffffffffffffffff"},
    // An unknown failure.
    {"stream", "4a584833060000000800000000000000ffffffffffffffff"},
    // A string longer than its table.
    {"stream", "4a584833010000000800000000000000ffffffffffffffff"},
    // Chunk 2^63.
    {"channel_chunks",
     "01000000000000000700000000000000000000000000000064000000000000000000000000000080"
     "6400000000000000"},
    // More than a slot.
    {"channel_chunks",
     "000000000000000007000000000000000000000000000000ffffffffffffffff0000000000000000"
     "0110000000000000"},
}};

int Digit(char digit) { return digit <= '9' ? digit - '0' : digit - 'a' + 10; }

std::string FromHex(std::string_view hex) {
  std::string bytes;
  for (size_t i = 0; i + 1 < hex.size(); i += 2) {
    bytes.push_back(static_cast<char>(Digit(hex[i]) * 16 + Digit(hex[i + 1])));
  }
  return bytes;
}

}  // namespace

std::vector<std::string> CorpusOf(std::string_view fuzzer) {
  std::vector<std::string> inputs;
  for (const auto& [name, hex] : kCorpus) {
    if (name == fuzzer) inputs.push_back(FromHex(hex));
  }
  return inputs;
}

}  // namespace jaxhet::testing
