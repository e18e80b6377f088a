#include "xla_plugin/transport/device_channel/proxied_channel.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "xla_plugin/transport/device_channel/channel_arena.h"

namespace jaxhet {

DeviceChunkInfo ParseDeviceChunkInfo(std::span<const std::byte, sizeof(DeviceChunkInfo)> bytes,
                                     uint64_t chunk, size_t slot_bytes) {
  DeviceChunkInfo info{};
  std::memcpy(&info, bytes.data(), bytes.size());
  if (info.chunk != chunk) {
    Throw(ErrorCode::kTransport, "the peer sent chunk ", info.chunk, " in the place of chunk ",
          chunk);
  }
  if (info.num_bytes > std::min<uint64_t>(slot_bytes, info.exchange_bytes)) {
    Throw(ErrorCode::kTransport, "the peer sent a chunk of ", info.num_bytes,
          " bytes; its slot holds ", slot_bytes, ", its exchange ", info.exchange_bytes);
  }
  return info;
}

std::optional<DeviceChunkInfo> ChunkCounter::Next() const {
  if (log_.last() < exchange_) return std::nullopt;
  const std::optional<Launch> launch = log_.Find(exchange_);
  if (!launch) Throw(ErrorCode::kTransport, "exchange ", exchange_, " was overwritten");
  const size_t chunk_bytes = ChunkBytes(launch->num_bytes, slot_bytes_);
  return DeviceChunkInfo{
      .exchange = exchange_,
      .plan = launch->plan,
      .index = launch->index,
      .exchange_bytes = launch->num_bytes,
      .chunk = chunk_,
      .num_bytes = std::min<uint64_t>(chunk_bytes, launch->num_bytes - done_bytes_)};
}

void ChunkCounter::Advance(const DeviceChunkInfo& chunk) {
  ++chunk_;
  done_bytes_ += chunk.num_bytes;
  if (done_bytes_ < chunk.exchange_bytes) return;
  done_bytes_ = 0;
  ++exchange_;
}

ProxiedChannel::ProxiedChannel(Device& device, const ArenaPiece* piece, size_t num_tasks)
    : passed_(num_tasks) {
  if (piece == nullptr) words_memory_ = device.AllocatePinned(sizeof(ChannelWords));
  auto* const words = new (piece == nullptr ? words_memory_.get() : piece->words) ChannelWords{};
  words->intact.value = kOpen;
  SetWords(*words, piece == nullptr ? device.DeviceAddress(words) : piece->words_on_device,
           LaunchLog(*source_launches_), LaunchLog(*target_launches_));
}

std::optional<uint64_t> ProxiedChannel::Passed() const {
  return *std::ranges::min_element(passed_, {}, [](const auto& passed) { return passed.load(); });
}

std::string ProxiedChannel::Failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

void ProxiedChannel::Fail(const Error& error) {
  const std::lock_guard lock(mutex_);
  if (failure_.empty()) failure_ = error.text();
}

bool ProxiedChannel::IsAgreed(const DeviceChunkInfo& info) {
  const Launch launch{.plan = info.plan, .index = info.index, .num_bytes = info.exchange_bytes};
  {
    const std::lock_guard lock(publishing_);
    if (source_log().Find(info.exchange) != launch) source_log().Publish(info.exchange, launch);
  }
  const std::optional<Launch> own = target_log().Find(info.exchange);
  return !own || *own == launch;
}

}  // namespace jaxhet
