#ifndef TESTS_CPP_FUZZ_H_
#define TESTS_CPP_FUZZ_H_

#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "tests/cpp/testing.h"
#include "xla_plugin/base/fd.h"
#include "xla_plugin/transport/transport.h"

// Fuzzing of what parses bytes of peers, by mutation of sound inputs. It needs no other compiler
// than the tests do; sanitizers find what it breaks. Environment:
//   FUZZ_SECONDS  time of each fuzzer (default 0.3)
//   FUZZ_SEED     seed of the first mutation (default 1); a finding prints the seed that repeats it
namespace jaxhet::testing {

struct Fuzzer {
  std::string_view name;
  // The files of the engine whose parsers it reaches (tests/python/test_fuzz.py).
  std::vector<std::string_view> covers;
  std::vector<std::string> (*seeds)();  // sound inputs, attacks, and inputs that were findings
  // Parses an input. An Error means that the input is refused; another exception is a finding.
  void (*run)(std::string_view input);
};

// Adds the test Fuzz.<name>. ctest runs each as a test of its own (tests/cpp/CMakeLists.txt).
bool AddFuzzer(const Fuzzer& fuzzer, const Location& location = Location::current());

// The bytes of an object.
template <typename T>
std::string BytesOf(const T& object) {
  static_assert(std::is_trivially_copyable_v<T>);
  return {reinterpret_cast<const char*>(&object), sizeof object};
}

// Reads an input piece by piece; bytes after its end are zero.
class InputReader {
 public:
  explicit InputReader(std::string_view input) : rest_(input) {}

  bool empty() const { return rest_.empty(); }
  template <typename T>
  T Take() {
    static_assert(std::is_trivially_copyable_v<T>);
    T value{};
    const std::string_view bytes = TakeBytes(sizeof value);
    std::memcpy(&value, bytes.data(), bytes.size());
    return value;
  }
  std::string_view TakeBytes(size_t num_bytes) {
    const std::string_view bytes = rest_.substr(0, num_bytes);
    rest_.remove_prefix(bytes.size());
    return bytes;
  }
  // With a length of 16 bits before them, as Sized() writes it.
  std::string_view TakeSized() { return TakeBytes(Take<uint16_t>()); }

 private:
  std::string_view rest_;
};

std::string Sized(std::string_view bytes);

// Both ends of a connection, neither of which blocks.
std::pair<Fd, Fd> UnixPair();
// Writes until the socket's buffer is full.
void WriteSome(const Fd& socket, std::string_view bytes);
// Reads and drops the bytes that have arrived.
void Drain(const Fd& socket);

// The engine's side of a connection: the transfers that are open, with a result each.
class FuzzHost : public ConnectionHost {
 public:
  void Add(Transfer& transfer) { transfers_[transfer.ticket] = &transfer; }
  bool is_lost() const { return is_lost_; }

  void Send(std::span<const iovec> message) override;
  void Log(std::string_view /*what*/) override {}
  void Lost(std::string_view /*why*/) override { is_lost_ = true; }
  Transfer& Find(uint64_t ticket) override;
  void Sent(Transfer& transfer, size_t num_bytes) override;
  void Received(Transfer& transfer, size_t num_bytes) override;

 private:
  void CloseIfDone(const Transfer& transfer);

  std::map<uint64_t, Transfer*> transfers_;
  bool is_lost_ = false;
};

}  // namespace jaxhet::testing

#endif  // TESTS_CPP_FUZZ_H_
