#include "xla_plugin/transport/ring/shared_words.h"

#include <cstring>
#include <new>

#include "xla_plugin/base/error.h"

namespace jaxhet {
namespace {

constexpr size_t kPage = 4096;
// The extra bytes begin at a page.
constexpr size_t kExtraOffset = (sizeof(RingWords) + 2 * kPage - 1) & ~(kPage - 1);

}  // namespace

SharedWordsRing::SharedWordsRing(Device& device, size_t extra_bytes)
    : memory_(kExtraOffset + extra_bytes) {
  Register(device);
  words().gate.value = kOpen;  // the rest is zero, as new shared memory is
}

SharedWordsRing::SharedWordsRing(Device& device, const SharedMemoryInfo& memory, size_t extra_bytes)
    : memory_(memory, SharedMemory::Access::kReadWrite) {
  if (memory.num_bytes != kExtraOffset + extra_bytes) {
    Throw(ErrorCode::kTransport, "the ring has another size here; is it another jaxhet?");
  }
  Register(device);
}

void SharedWordsRing::Register(Device& device) {
  const std::span<std::byte> pages = memory_.pages();
  registration_ = device.Register(pages);
  auto* const address = static_cast<std::byte*>(device.DeviceAddress(pages.data()));
  SetWords(memory_.data(), address + (memory_.data() - pages.data()));
  extra_ = address + kExtraOffset;
}

std::string ToOffer(const SharedRingInfo& info) {
  return {reinterpret_cast<const char*>(&info), sizeof info};
}

SharedRingInfo ParseSharedRingInfo(std::string_view offer) {
  SharedRingInfo info{};
  if (offer.size() != sizeof info) Throw(ErrorCode::kTransport, "the peer's offer is cut");
  std::memcpy(&info, offer.data(), sizeof info);
  CheckSlotBytes(info.slot_bytes);
  return info;
}

}  // namespace jaxhet
