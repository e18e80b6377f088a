#include "xla_plugin/transport/device_channel/tcp_channel.h"

#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"
#include "xla_plugin/transport/device_channel/proxied_channel.h"
#include "xla_plugin/transport/device_channel/sockets.h"
#include "xla_plugin/transport/records.h"

namespace jaxhet {
namespace {

struct TcpOfferInfo {
  uint64_t slot_bytes;
};

std::vector<Fd> BlockingCopies(std::span<const Fd> sockets) {
  std::vector<Fd> copies;
  for (const Fd& socket : sockets) copies.push_back(BlockingCopy(socket));
  return copies;
}

class TcpChannel : public ProxiedChannel {
 public:
  TcpChannel(const ChannelSetup& setup, size_t slot_bytes)
      : ProxiedChannel(setup.device),
        sockets_(BlockingCopies(setup.sockets)),
        slots_memory_(setup.device.AllocatePinned(CheckedMultiply(kChannelSlots, slot_bytes))) {
    host_slots_ = static_cast<std::byte*>(slots_memory_.get());
    SetSlots(setup.device.DeviceAddress(host_slots_), slot_bytes);
  }
  ~TcpChannel() override { Stop(); }

  std::vector<int> SocketFds() const override {
    std::vector<int> fds;
    for (const Fd& socket : sockets_) fds.push_back(socket.get());
    return fds;
  }

  // The sockets were authenticated; there is no memory to prove.
  void Prove(Device& /*device*/, std::span<const std::byte> /*proof*/) override {}
  bool IsProven(Device& /*device*/, std::span<const std::byte> /*proof*/) override { return true; }

 protected:
  size_t num_threads() const override { return sockets_.size(); }
  void Interrupt() override {
    for (const Fd& socket : sockets_) shutdown(socket.get(), SHUT_RDWR);
  }

  std::byte* host_slot(uint64_t chunk) const { return host_slots_ + SlotOf(chunk) * slot_bytes(); }
  // False if the channel goes before the word has the value.
  bool Await(DeviceWord& word, uint32_t value) const {
    for (Backoff backoff; !Has(word, value); backoff.Wait()) {
      if (stopping()) return false;
    }
    return true;
  }

  const Fd& socket(size_t index) const { return sockets_[index]; }

 private:
  std::vector<Fd> sockets_;
  PinnedMemory slots_memory_;
  std::byte* host_slots_ = nullptr;
};

class TcpSource final : public TcpChannel {
 public:
  TcpSource(const ChannelSetup& setup, size_t slot_bytes) : TcpChannel(setup, slot_bytes) {
    if (setup.encryption == Encryption::kOff) return;
    for (SealKeys& keys : setup.keys) sealed_.emplace_back(keys.encryption, std::move(keys.send));
  }
  ~TcpSource() override { Stop(); }

 protected:
  // Every thread goes through all chunks and sends its own.
  void Carry(size_t index) override {
    const LaunchLog& log = words().source;
    ChunkCounter chunks(log, slot_bytes());
    while (log.WaitFor(chunks.exchange(), [this] { return stopping(); })) {
      const std::optional<DeviceChunkInfo> info = chunks.Next();
      if (!info) continue;
      if (info->chunk % num_threads() == index && !SendChunk(index, *info)) return;
      chunks.Advance(*info);
      ComeTo(index, chunks.exchange());
    }
  }

 private:
  bool SendChunk(size_t index, const DeviceChunkInfo& info) {
    const uint32_t slot = SlotOf(info.chunk);
    if (!Await(words().tail.at(slot), GenerationOf(info.chunk))) return false;
    if (sealed_.empty()) {
      SendAll(socket(index), &info, sizeof info, info.num_bytes > 0 ? MSG_MORE : 0);
      SendAll(socket(index), host_slot(info.chunk), info.num_bytes, 0);
    } else {
      SendSealed(index, info);
    }
    Set(words().head.at(slot), GenerationOf(info.chunk));
    return true;
  }

  void SendSealed(size_t index, const DeviceChunkInfo& info) {
    IoList bytes;
    bytes.Add(&info, sizeof info);
    bytes.Add(host_slot(info.chunk), info.num_bytes);
    RecordWriter& writer = sealed_[index];
    for (size_t done = 0; done < bytes.num_bytes();) {
      done += writer.Add(bytes, done);
      SendAll(socket(index), writer.unsent().data(), writer.unsent().size(), 0);
    }
  }

  std::vector<RecordWriter> sealed_;  // by socket; none: bytes travel as they are
};

class TcpTarget final : public TcpChannel {
 public:
  TcpTarget(const ChannelSetup& setup, size_t slot_bytes) : TcpChannel(setup, slot_bytes) {
    if (setup.encryption == Encryption::kOff) return;
    for (SealKeys& keys : setup.keys) {
      sealed_.emplace_back(keys.encryption, std::move(keys.receive));
    }
  }
  ~TcpTarget() override { Stop(); }

 protected:
  void Carry(size_t index) override {
    std::array<std::byte, sizeof(DeviceChunkInfo)> bytes{};
    for (uint64_t chunk = index; Read(index, bytes.data(), bytes.size()); chunk += num_threads()) {
      const DeviceChunkInfo info = ParseDeviceChunkInfo(bytes, chunk, slot_bytes());
      const uint32_t slot = SlotOf(info.chunk);
      if (!Await(words().head.at(slot), GenerationOf(info.chunk) - 1)) return;
      if (!Read(index, host_slot(info.chunk), info.num_bytes)) {
        Throw(ErrorCode::kTransport, "the peer has closed the connection");
      }
      if (!IsAgreed(info)) continue;  // whoever looks at the logs fails the job
      Set(words().tail.at(slot), GenerationOf(info.chunk));
    }
  }

 private:
  // False if the peer has closed the connection before the first byte.
  bool Read(size_t index, void* to, size_t num_bytes) {
    auto* bytes = static_cast<std::byte*>(to);
    const auto* const begin = bytes;
    while (num_bytes > 0) {
      const size_t done = sealed_.empty() ? Receive(index, bytes, num_bytes, MSG_WAITALL)
                                          : ReceiveSealed(index, bytes, num_bytes);
      if (done == 0 && bytes == begin) return false;
      if (done == 0) Throw(ErrorCode::kTransport, "the peer has closed the connection");
      bytes += done;
      num_bytes -= done;
    }
    return true;
  }

  // Both block, and return 0 if the peer has closed the connection.
  size_t Receive(size_t index, void* to, size_t num_bytes, int flags) {
    while (true) {
      const ssize_t done = recv(socket(index).get(), to, num_bytes, flags);
      if (done >= 0) return static_cast<size_t>(done);
      if (errno != EINTR) ThrowErrno("recv");
    }
  }
  size_t ReceiveSealed(size_t index, void* to, size_t num_bytes) {
    RecordReader& reader = sealed_[index];
    const iovec wanted = ToIovec(to, num_bytes);
    while (true) {
      const size_t taken = reader.Take({&wanted, 1});
      if (taken > 0) return taken;
      const iovec room = reader.Room();
      const size_t arrived = Receive(index, room.iov_base, room.iov_len, 0);
      if (arrived == 0 && !reader.is_empty()) {
        Throw(ErrorCode::kTransport, "the connection ended within a record");
      }
      if (arrived == 0) return 0;
      reader.Arrived(arrived);
    }
  }

  std::vector<RecordReader> sealed_;  // by socket; none: bytes travel as they are
};

void CheckSockets(const ChannelSetup& setup) {
  if (setup.same_process) Throw(ErrorCode::kTransport, "both devices are of one process");
  if (setup.sockets.empty()) Throw(ErrorCode::kTransport, "no sockets were connected for it");
}

}  // namespace

std::pair<std::unique_ptr<DeviceChannel>, std::string> MakeTcpChannel(const ChannelSetup& setup) {
  CheckSockets(setup);
  const TcpOfferInfo info{HostSlotBytes(setup)};
  return {std::make_unique<TcpTarget>(setup, info.slot_bytes),
          std::string(reinterpret_cast<const char*>(&info), sizeof info)};
}

std::unique_ptr<DeviceChannel> OpenTcpChannel(const ChannelSetup& setup, std::string_view offer) {
  CheckSockets(setup);
  TcpOfferInfo info{};
  if (offer.size() != sizeof info) Throw(ErrorCode::kTransport, "the peer's offer is cut");
  std::memcpy(&info, offer.data(), sizeof info);
  CheckSlotBytes(info.slot_bytes);
  return std::make_unique<TcpSource>(setup, info.slot_bytes);
}

}  // namespace jaxhet
