#include "tests/cpp/fuzz.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <random>

#include "tests/cpp/testing.h"
#include "xla_plugin/base/checked.h"

// Defined by the sanitizers' runtime; null in other builds.
// NOLINTNEXTLINE(bugprone-reserved-identifier,readability-identifier-naming)
extern "C" __attribute__((weak)) void __sanitizer_set_death_callback(void (*callback)());

namespace jaxhet::testing {
namespace {

using Random = std::mt19937_64;

constexpr unsigned kLongestRunSeconds = 20;  // time limit of one input
constexpr size_t kMostInputBytes = 1 << 15;
// Parsers have no threads: ThreadSanitizer finds nothing in them.
constexpr double kSeconds = kIsThreadSanitized ? 0.01 : 0.3;

// Running fuzzer and its input, for the report of a crash or of a hang.
struct Current {
  std::string name;
  uint64_t seed = 0;  // 0: not mutated
  std::string input;
};

Current& TheCurrent() {
  static auto* const current = new Current;
  return *current;
}

void Report() {
  const Current& current = TheCurrent();
  std::fprintf(stderr, "finding of fuzz.%s, FUZZ_SEED=%llu, input:\n", current.name.c_str(),
               static_cast<unsigned long long>(current.seed));
  for (const char c : current.input) std::fprintf(stderr, "%02x", static_cast<unsigned char>(c));
  std::fprintf(stderr, "\n");
}

void OnSignal(int signal) {
  Report();
  std::fprintf(stderr, signal == SIGALRM ? "it hangs\n" : "it crashes\n");
  _exit(1);
}

void WatchForCrashes() {
  if (__sanitizer_set_death_callback != nullptr) {
    __sanitizer_set_death_callback(&Report);
  } else {
    for (const int signal : {SIGSEGV, SIGBUS, SIGABRT, SIGFPE}) std::signal(signal, &OnSignal);
  }
  std::signal(SIGALRM, &OnSignal);
}

// Numbers at which parsers break.
uint64_t Interesting(Random& random) {
  constexpr std::array<uint64_t, 14> kNumbers = {
      0,      1,       2,         7,          8,          0xff,        0x7fff,
      0xffff, 1 << 20, 1U << 31U, UINT32_MAX, 1ULL << 62, 1ULL << 63U, UINT64_MAX};
  return kNumbers[random() % kNumbers.size()] + random() % 3 - 1;
}

void Overwrite(std::string& input, Random& random) {
  const size_t width = size_t{1} << random() % 4;
  if (input.size() < width) return;
  const uint64_t number = Interesting(random);
  std::memcpy(&input[random() % (input.size() - width + 1)], &number, width);
}

void Splice(std::string& input, const std::vector<std::string>& seeds, Random& random) {
  const std::string& other = seeds[random() % seeds.size()];
  const size_t from = random() % (other.size() + 1);
  const size_t count = random() % (other.size() - from + 1);
  input.insert(random() % (input.size() + 1), other, from, count);
}

void MutateOnce(std::string& input, const std::vector<std::string>& seeds, Random& random) {
  const size_t at = random() % (input.size() + 1);
  const size_t count = std::min<size_t>(random() % 24, input.size() - at);
  switch (random() % 8) {
    case 0:
      if (at < input.size()) input[at] = static_cast<char>(input[at] ^ (1 << random() % 8));
      return;
    case 1:
      if (at < input.size()) input[at] = static_cast<char>(random());
      return;
    case 2:
      input.erase(at, count);
      return;
    case 3:
      input.insert(at, input.substr(at, count));
      return;
    case 4:
      for (size_t i = 0; i < count; ++i) input.insert(input.begin(), static_cast<char>(random()));
      return;
    case 5:
      return Splice(input, seeds, random);
    default:
      return Overwrite(input, random);
  }
}

std::string Mutated(const std::vector<std::string>& seeds, uint64_t seed) {
  Random random(seed);
  std::string input = seeds[random() % seeds.size()];
  for (uint64_t i = random() % 4 + 1; i > 0; --i) MutateOnce(input, seeds, random);
  if (random() % 16 == 0) input.resize(random() % (input.size() + 1));
  input.resize(std::min(input.size(), kMostInputBytes));
  return input;
}

double Number(const char* name, double otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtod(text, nullptr);
}

class Run {
 public:
  explicit Run(const Fuzzer& fuzzer) : fuzzer_(fuzzer) { TheCurrent().name = fuzzer.name; }

  void On(std::string input, uint64_t seed) {
    TheCurrent().seed = seed;
    TheCurrent().input = std::move(input);
    alarm(kLongestRunSeconds);
    ++executions_;
    try {
      fuzzer_.run(TheCurrent().input);
    } catch (const Error&) {
      ++refusals_;
    } catch (const std::exception& error) {
      Report();
      ADD_FAILURE() << error.what();
    }
    alarm(0);
  }

  void Print() const {
    std::fprintf(stderr, "fuzz.%s: %zu executions, %zu refused\n", TheCurrent().name.c_str(),
                 executions_, refusals_);
  }

 private:
  const Fuzzer& fuzzer_;
  size_t executions_ = 0;
  size_t refusals_ = 0;
};

void RunFuzzer(const Fuzzer& fuzzer) {
  WatchForCrashes();
  const std::vector<std::string> seeds = fuzzer.seeds();
  Run run(fuzzer);
  for (const std::string& input : seeds) run.On(input, 0);
  const auto seconds = std::chrono::duration<double>(Number("FUZZ_SECONDS", kSeconds));
  const auto end = std::chrono::steady_clock::now() + seconds;
  auto seed = static_cast<uint64_t>(Number("FUZZ_SEED", 1));
  do {
    run.On(Mutated(seeds, seed), seed);
    ++seed;
  } while (std::chrono::steady_clock::now() < end);
  run.Print();
}

class FuzzTest : public ::testing::Test {
 public:
  explicit FuzzTest(Fuzzer fuzzer) : fuzzer_(std::move(fuzzer)) {}

 private:
  void TestBody() override { RunFuzzer(fuzzer_); }

  Fuzzer fuzzer_;
};

}  // namespace

// UBSan's runtime calls it before it ends the process.
// NOLINTNEXTLINE(bugprone-reserved-identifier,readability-identifier-naming)
extern "C" __attribute__((visibility("default"))) void __ubsan_on_report() { Report(); }

bool AddFuzzer(const Fuzzer& fuzzer, const Location& location) {
  // NOLINTNEXTLINE(clang-analyzer-cplusplus.NewDeleteLeaks): GoogleTest owns the factory
  ::testing::RegisterTest("Fuzz", std::string(fuzzer.name).c_str(), nullptr, nullptr,
                          location.file_name(), static_cast<int>(location.line()),
                          [fuzzer]() -> ::testing::Test* { return new FuzzTest(fuzzer); });
  return true;
}

std::string Sized(std::string_view bytes) {
  return BytesOf(CheckedCast<uint16_t>(bytes.size())).append(bytes);
}

std::pair<Fd, Fd> UnixPair() {
  std::array<int, 2> ends{};
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends.data()) != 0) {
    ThrowErrno("socketpair");
  }
  return {Fd(ends[0]), Fd(ends[1])};
}

void WriteSome(const Fd& socket, std::string_view bytes) {
  [[maybe_unused]] const ssize_t sent =
      send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

void Drain(const Fd& socket) {
  std::array<char, 4096> buffer;  // NOLINT(cppcoreguidelines-pro-type-member-init)
  while (recv(socket.get(), buffer.data(), buffer.size(), MSG_DONTWAIT) > 0) {
  }
}

void FuzzHost::Send(std::span<const iovec> message) { EXPECT_FALSE(message.empty()); }

Transfer& FuzzHost::Find(uint64_t ticket) {
  const auto found = transfers_.find(ticket);
  if (found == transfers_.end()) Throw(ErrorCode::kTransport, "no transfer ", ticket);
  return *found->second;
}

void FuzzHost::Sent(Transfer& transfer, size_t num_bytes) {
  transfer.sent += num_bytes;
  EXPECT_LE(transfer.sent, transfer.send.num_bytes());
  CloseIfDone(transfer);
}

void FuzzHost::Received(Transfer& transfer, size_t num_bytes) {
  if (!InBounds(transfer.received, num_bytes, transfer.receive.num_bytes())) {
    Throw(ErrorCode::kTransport, kBytesTwice);
  }
  transfer.received += num_bytes;
  CloseIfDone(transfer);
}

void FuzzHost::CloseIfDone(const Transfer& transfer) {
  if (transfer.IsDone()) transfers_.erase(transfer.ticket);
}

}  // namespace jaxhet::testing
