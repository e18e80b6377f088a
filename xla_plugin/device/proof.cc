#include "xla_plugin/device/proof.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <new>
#include <thread>

#include "xla_plugin/base/error.h"

namespace jaxhet {
namespace {

constexpr std::chrono::seconds kWriteTimeout{10};

}  // namespace

void WriteProof(Device& device, void* to, std::span<const std::byte> proof) {
  const PinnedMemory host = device.AllocatePinned(proof.size());
  const Stream stream = device.CreateStream(StreamPriority::kNormal);
  std::memcpy(host.get(), proof.data(), proof.size());
  device.Copy(stream.get(), to, device.DeviceAddress(host.get()), proof.size());
  device.Synchronize(stream.get());
}

bool HasProof(Device& device, const void* from, std::span<const std::byte> proof) {
  const PinnedMemory host = device.AllocatePinned(proof.size());
  const Stream stream = device.CreateStream(StreamPriority::kNormal);
  device.Copy(stream.get(), device.DeviceAddress(host.get()), from, proof.size());
  device.Synchronize(stream.get());
  return std::memcmp(host.get(), proof.data(), proof.size()) == 0;
}

PatternWriter::PatternWriter(Device& device)
    : device_(device),
      word_(device.AllocatePinned(sizeof(uint32_t))),
      program_(device.CreateStream(StreamPriority::kNormal)) {
  new (word_.get()) uint32_t(0);
}

PatternWriter::~PatternWriter() {
  try {
    device_.Synchronize(program_.get());
  } catch (const Error& error) {
    LogLine(error.what());
  }
}

std::vector<std::byte> PatternWriter::Write(std::span<std::byte> place) {
  ++number_;
  const size_t half = place.size() / 2;
  std::vector<std::byte> pattern(place.size(), std::byte(2 * number_));
  std::fill_n(pattern.begin(), half, std::byte(2 * number_ + 1));
  device_.Fill(program_.get(), place.data(), pattern.front(), half);
  device_.Fill(program_.get(), place.data() + half, pattern.back(), place.size() - half);
  device_.WriteValue(program_.get(), device_.DeviceAddress(word_.get()), number_);
  const std::atomic_ref word(*static_cast<uint32_t*>(word_.get()));
  const auto limit = std::chrono::steady_clock::now() + kWriteTimeout;
  while (word.load(std::memory_order_acquire) < number_) {
    if (std::chrono::steady_clock::now() >= limit) {
      Throw(ErrorCode::kDevice, device_.info().ToString(), " has not filled ", place.size(),
            " bytes within ", kWriteTimeout.count(), " s");
    }
    std::this_thread::yield();
  }
  return pattern;
}

}  // namespace jaxhet
