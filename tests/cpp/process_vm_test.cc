#include "xla_plugin/transport/process_vm/process_vm.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tests/cpp/fuzz.h"
#include "tests/cpp/testing.h"

// Reads of a process's memory when its pid is, or becomes, another process's.
namespace jaxhet::testing {
namespace {

using ::testing::HasSubstr;

constexpr size_t kNumBytes = 1'000;
constexpr std::byte kRight{1};
constexpr std::byte kWrong{2};
using Bytes = std::vector<std::byte>;

class Host final : public FuzzHost {
 public:
  void Lost(std::string_view why) override {
    why_ = why;
    FuzzHost::Lost(why);
  }
  const std::string& why() const { return why_; }

 private:
  std::string why_;
};

// One end of a path; the other end may be in the same process.
class End {
 public:
  std::string Offer() { return connection_->Offer(); }
  void Accept(std::string_view offer) { connection_->Accept(offer); }

  // Bytes read out of `source` in the peer's memory; none if the peer was lost.
  std::optional<Bytes> Read(const Bytes& source) {
    Bytes result(kNumBytes);
    Transfer transfer;
    transfer.receive.Add(result.data(), result.size());
    transfer.ticket = transfer.peer_ticket = 1;
    host_.Add(transfer);
    const std::array<uint64_t, 2> segment{reinterpret_cast<uint64_t>(source.data()), kNumBytes};
    connection_->Begin(transfer, BytesOf(segment));
    while (connection_->Advance()) {
    }
    copied_ = result;
    if (transfer.received != kNumBytes) return std::nullopt;
    return result;
  }
  void Fail() { state_.SetFailed(); }
  // The bytes of the last Read(), also of one that does not count.
  const Bytes& copied() const { return copied_; }
  const std::string& why_lost() const { return host_.why(); }

 private:
  MemoryState state_;
  Host host_;
  Bytes copied_;
  TransportSetup setup_{.same_host = true,
                        .memory_state = &state_,
                        .nics = nullptr,
                        .encryption = Encryption::kOff,
                        .sockets = {}};
  std::unique_ptr<Connection> connection_ = OpenProcessVm(setup_, host_);
};

// A child that keeps the memory of this moment.
pid_t StartCopy() {
  return StartChild([]() -> int {
    while (true) pause();
  });
}

void Kill(pid_t child) {
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
}

// A child with this pid; none if the kernel does not let us choose pids.
std::optional<pid_t> StartCopyAs(pid_t pid) {
  for (int tries = 0; tries < 100; ++tries) {
    std::ofstream last("/proc/sys/kernel/ns_last_pid");
    if (!(last << pid - 1).flush()) return std::nullopt;
    const pid_t child = StartCopy();
    if (child == pid) return child;
    Kill(child);
  }
  return std::nullopt;
}

// This process's offer with another pid, which is its first field.
std::string OfferOf(End& end, int64_t pid) {
  std::string offer = end.Offer();
  std::memcpy(offer.data(), &pid, sizeof pid);
  return offer;
}

TEST(ProcessVmTest, MemoryOfAnotherProcessThanThePeerIsRefused) {
  static const std::array<uint64_t, 3> no_nonce{};
  End peer;
  End own;
  std::string offer = peer.Offer();
  const auto address = reinterpret_cast<uint64_t>(no_nonce.data());
  std::memcpy(offer.data() + offer.size() - sizeof address, &address, sizeof address);
  EXPECT_THAT(ThrownText([&] { own.Accept(offer); }),
              HasSubstr("TransportError: process_vm_readv reads another process than the peer"));
}

TEST(ProcessVmTest, BytesOfAProcessThatHasThePidOfADeadPeerDoNotCount) {
  Bytes source(kNumBytes, kRight);
  End peer;
  End own;
  const pid_t first = StartCopy();
  own.Accept(OfferOf(peer, first));
  EXPECT_EQ(own.Read(source), Bytes(kNumBytes, kRight));
  Kill(first);
  std::ranges::fill(source, kWrong);
  const std::optional<pid_t> second = StartCopyAs(first);
  if (!second) GTEST_SKIP() << "this process can't choose the pid of a child";
  EXPECT_FALSE(own.Read(source));
  EXPECT_EQ(own.copied(), Bytes(kNumBytes, kWrong));
  EXPECT_EQ(own.why_lost(), "it failed or ended while its memory was read");
  Kill(*second);
}

TEST(ProcessVmTest, BytesOfAPeerThatHasFailedDoNotCount) {
  const Bytes source(kNumBytes, kRight);
  End peer;
  End own;
  own.Accept(peer.Offer());
  EXPECT_EQ(own.Read(source), source);
  peer.Fail();
  EXPECT_FALSE(own.Read(source));
  EXPECT_EQ(own.why_lost(), "it failed or ended while its memory was read");
}

// Memory of an engine that has ended may be anything, also a word that says that all is well.
TEST(ProcessVmTest, BytesOfAPeerThatHasForgottenItsStateDoNotCount) {
  const Bytes source(kNumBytes, kRight);
  End own;
  alignas(MemoryState) std::array<std::byte, sizeof(MemoryState)> place{};
  auto* const state = new (place.data()) MemoryState;
  const std::array<uint64_t, 4> offer{static_cast<uint64_t>(getpid()), state->nonce[0],
                                      state->nonce[1], reinterpret_cast<uint64_t>(state)};
  own.Accept(BytesOf(offer));
  EXPECT_EQ(own.Read(source), source);
  state->~MemoryState();
  EXPECT_FALSE(own.Read(source));
}

}  // namespace
}  // namespace jaxhet::testing
