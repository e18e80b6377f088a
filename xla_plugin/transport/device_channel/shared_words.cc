#include "xla_plugin/transport/device_channel/shared_words.h"

#include <cstring>
#include <new>

#include "xla_plugin/base/error.h"

namespace jaxhet {
namespace {

constexpr size_t kPage = 4096;
// The extra bytes begin at a multiple of kPage.
constexpr size_t kExtraOffset = (sizeof(SharedWords) + 2 * kPage - 1) & ~(kPage - 1);

}  // namespace

SharedWordsChannel::SharedWordsChannel(Device& device, size_t extra_bytes)
    : memory_(kExtraOffset + extra_bytes) {
  Register(device);
  words().intact.value = kOpen;  // the rest is zero, as new shared memory is
}

SharedWordsChannel::SharedWordsChannel(Device& device, const SharedMemoryInfo& memory,
                                       size_t extra_bytes)
    : memory_(memory, SharedMemory::Access::kReadWrite) {
  if (memory.num_bytes != kExtraOffset + extra_bytes) {
    Throw(ErrorCode::kTransport, "the device channel has another size here; is it another jaxhet?");
  }
  Register(device);
}

void SharedWordsChannel::Register(Device& device) {
  const std::span<std::byte> pages = memory_.pages();
  registration_ = device.Register(pages);
  auto* const address = static_cast<std::byte*>(device.DeviceAddress(pages.data()));
  SetWords(*reinterpret_cast<SharedWords*>(memory_.data()),
           address + (memory_.data() - pages.data()));
  extra_ = address + kExtraOffset;
}

std::string ToOffer(const SharedChannelInfo& info) {
  return {reinterpret_cast<const char*>(&info), sizeof info};
}

SharedChannelInfo ParseSharedChannelInfo(std::string_view offer) {
  SharedChannelInfo info{};
  if (offer.size() != sizeof info) Throw(ErrorCode::kTransport, "the peer's offer is cut");
  std::memcpy(&info, offer.data(), sizeof info);
  CheckSlotBytes(info.slot_bytes);
  return info;
}

}  // namespace jaxhet
