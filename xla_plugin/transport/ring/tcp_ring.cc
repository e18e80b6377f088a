#include "xla_plugin/transport/ring/tcp_ring.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <new>
#include <thread>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"
#include "xla_plugin/base/thread.h"

namespace jaxhet {
namespace {

using std::chrono::microseconds;

// Before the bytes of each chunk.
struct ChunkInfo {
  uint64_t exchange;  // its number on the ring
  int64_t plan;
  int64_t index;
  uint64_t exchange_bytes;
  uint64_t chunk;  // its number on the ring
  uint64_t num_bytes;
};

struct TcpOfferInfo {
  uint64_t slot_bytes;
};

// Waits for something that a device does: at once if it comes soon, without a busy core if not.
class Backoff {
 public:
  void Wait() {
    if (++turns_ < kSpins) return;
    std::this_thread::sleep_for(microseconds(turns_ < kShortWaits ? 20 : 200));
  }

 private:
  static constexpr int kSpins = 2'000;
  static constexpr int kShortWaits = 4'000;
  int turns_ = 0;
};

std::vector<Fd> Duplicate(std::span<const Fd> sockets) {
  std::vector<Fd> copies;
  for (const Fd& socket : sockets) {
    const Fd& copy = copies.emplace_back(fcntl(socket.get(), F_DUPFD_CLOEXEC, 0));
    const int flags = copy ? fcntl(copy.get(), F_GETFL) : -1;
    if (flags < 0 || fcntl(copy.get(), F_SETFL, flags & ~O_NONBLOCK) < 0) ThrowErrno("fcntl");
  }
  return copies;
}

class TcpRing : public RingEnd {
 public:
  TcpRing(const RingSetup& setup, size_t slot_bytes)
      : sockets_(Duplicate(setup.sockets)),
        words_memory_(setup.device.AllocatePinned(sizeof(RingWords))),
        slots_memory_(setup.device.AllocatePinned(CheckedMultiply(kRingSlots, slot_bytes))) {
    auto* const words = new (words_memory_.get()) RingWords{};
    words->gate.value = kOpen;
    SetWords(reinterpret_cast<std::byte*>(words), setup.device.DeviceAddress(words));
    host_slots_ = static_cast<std::byte*>(slots_memory_.get());
    SetSlots(setup.device.DeviceAddress(host_slots_), slot_bytes);
  }
  ~TcpRing() override { Stop(); }

  // The sockets were authenticated; there is no memory to prove.
  void Prove(Device& /*device*/, std::span<const std::byte> /*proof*/) override {}
  bool IsProven(Device& /*device*/, std::span<const std::byte> /*proof*/) override { return true; }

  void Settle() override {
    for (size_t i = 0; i < sockets_.size(); ++i) {
      threads_.push_back(StartThread("jaxhet-ring", [this, i] { Run(i); }));
    }
  }

  void Cut() override { Stop(); }

  std::string Failure() const override {
    const std::lock_guard lock(mutex_);
    return failure_;
  }

 protected:
  // Threads call these; the classes that implement them stop the threads before they go.
  virtual void Carry(size_t socket) = 0;
  void Stop() {
    if (stopping_.exchange(true)) return;
    words().source.Wake();
    for (const Fd& socket : sockets_) shutdown(socket.get(), SHUT_RDWR);
    for (std::thread& thread : threads_) thread.join();
  }

  bool stopping() const { return stopping_; }
  size_t num_sockets() const { return sockets_.size(); }
  std::byte* host_slot(uint64_t chunk) const {
    return host_slots_ + chunk % kRingSlots * slot_bytes();
  }
  static uint32_t Turn(uint64_t chunk) { return static_cast<uint32_t>(chunk / kRingSlots + 1); }

  // False if the ring goes before the word has the value.
  bool Await(DeviceWord& word, uint32_t value) const {
    for (Backoff backoff; word.host().load(std::memory_order_acquire) < value; backoff.Wait()) {
      if (stopping_) return false;
    }
    return true;
  }

  void Write(size_t socket, const void* from, size_t num_bytes, int flags) {
    const auto* bytes = static_cast<const std::byte*>(from);
    while (num_bytes > 0) {
      const ssize_t done = send(sockets_[socket].get(), bytes, num_bytes, MSG_NOSIGNAL | flags);
      if (done < 0 && errno == EINTR) continue;
      if (done < 0) ThrowErrno("send");
      bytes += done;
      num_bytes -= static_cast<size_t>(done);
    }
  }
  // False if the peer has closed the connection before the first byte.
  bool Read(size_t socket, void* to, size_t num_bytes) {
    auto* bytes = static_cast<std::byte*>(to);
    const auto* const begin = bytes;
    while (num_bytes > 0) {
      const ssize_t done = recv(sockets_[socket].get(), bytes, num_bytes, MSG_WAITALL);
      if (done < 0 && errno == EINTR) continue;
      if (done < 0) ThrowErrno("recv");
      if (done == 0 && bytes == begin) return false;
      if (done == 0) Throw(ErrorCode::kTransport, "the peer has closed the connection");
      bytes += done;
      num_bytes -= static_cast<size_t>(done);
    }
    return true;
  }

 private:
  void Run(size_t socket) {
    try {
      Carry(socket);
    } catch (const Error& error) {
      const std::lock_guard lock(mutex_);
      if (!stopping_ && failure_.empty()) failure_ = error.text();
    }
  }

  std::vector<Fd> sockets_;
  PinnedMemory words_memory_;
  PinnedMemory slots_memory_;
  std::byte* host_slots_ = nullptr;
  std::vector<std::thread> threads_;
  std::atomic<bool> stopping_ = false;
  mutable std::mutex mutex_;
  std::string failure_;  // under mutex_
};

class TcpSource final : public TcpRing {
 public:
  using TcpRing::TcpRing;
  ~TcpSource() override { Stop(); }

 protected:
  // Every thread goes through all chunks and sends its own.
  void Carry(size_t socket) override {
    const LaunchLog& log = words().source;
    uint64_t chunk = 0;
    for (uint64_t number = 1; log.WaitFor(number, [this] { return stopping(); }); ++number) {
      const std::optional<Launch> launch = log.Find(number);
      if (!launch) Throw(ErrorCode::kTransport, "exchange ", number, " was overwritten");
      const size_t chunk_bytes = ChunkBytes(launch->num_bytes, slot_bytes());
      uint64_t left = launch->num_bytes;
      do {
        const uint64_t num_bytes = std::min<uint64_t>(chunk_bytes, left);
        left -= num_bytes;
        if (chunk % num_sockets() == socket &&
            !SendChunk(socket, number, *launch, chunk, num_bytes)) {
          return;
        }
        ++chunk;
      } while (left > 0);
    }
  }

 private:
  bool SendChunk(size_t socket, uint64_t number, const Launch& launch, uint64_t chunk,
                 uint64_t num_bytes) {
    const uint64_t slot = chunk % kRingSlots;
    if (!Await(words().filled.at(slot), Turn(chunk))) return false;
    const ChunkInfo info{.exchange = number,
                         .plan = launch.plan,
                         .index = launch.index,
                         .exchange_bytes = launch.num_bytes,
                         .chunk = chunk,
                         .num_bytes = num_bytes};
    Write(socket, &info, sizeof info, num_bytes > 0 ? MSG_MORE : 0);
    Write(socket, host_slot(chunk), num_bytes, 0);
    words().emptied.at(slot).host().store(Turn(chunk), std::memory_order_release);
    return true;
  }
};

class TcpTarget final : public TcpRing {
 public:
  using TcpRing::TcpRing;
  ~TcpTarget() override { Stop(); }

 protected:
  void Carry(size_t socket) override {
    for (ChunkInfo info{}; Read(socket, &info, sizeof info);) {
      if (info.num_bytes > slot_bytes() || info.chunk % num_sockets() != socket) {
        Throw(ErrorCode::kTransport, "the peer sent a chunk that does not fit");
      }
      const uint64_t slot = info.chunk % kRingSlots;
      if (!Await(words().emptied.at(slot), Turn(info.chunk) - 1)) return;
      if (!Read(socket, host_slot(info.chunk), info.num_bytes)) {
        Throw(ErrorCode::kTransport, "the peer has closed the connection");
      }
      if (!IsAgreed(info)) continue;  // whoever looks at the logs fails the job
      words().filled.at(slot).host().store(Turn(info.chunk), std::memory_order_release);
    }
  }

 private:
  // Says for the source what it has launched; false if the target has launched something else.
  bool IsAgreed(const ChunkInfo& info) {
    const Launch launch{.plan = info.plan, .index = info.index, .num_bytes = info.exchange_bytes};
    {
      const std::lock_guard lock(publishing_);
      if (words().source.Find(info.exchange) != launch) {
        words().source.Publish(info.exchange, launch);
      }
    }
    const std::optional<Launch> own = words().target.Find(info.exchange);
    return !own || *own == launch;
  }

  std::mutex publishing_;
};

void CheckSockets(const RingSetup& setup) {
  if (setup.same_process) Throw(ErrorCode::kTransport, "both devices are of one process");
  if (setup.sockets.empty()) Throw(ErrorCode::kTransport, "no sockets were connected for it");
}

}  // namespace

std::pair<std::unique_ptr<RingEnd>, std::string> MakeTcpRing(const RingSetup& setup) {
  CheckSockets(setup);
  const TcpOfferInfo info{setup.slot_bytes};
  return {std::make_unique<TcpTarget>(setup, setup.slot_bytes),
          std::string(reinterpret_cast<const char*>(&info), sizeof info)};
}

std::unique_ptr<RingEnd> OpenTcpRing(const RingSetup& setup, std::string_view offer) {
  CheckSockets(setup);
  TcpOfferInfo info{};
  if (offer.size() != sizeof info) Throw(ErrorCode::kTransport, "the peer's offer is cut");
  std::memcpy(&info, offer.data(), sizeof info);
  return std::make_unique<TcpSource>(setup, info.slot_bytes);
}

}  // namespace jaxhet
