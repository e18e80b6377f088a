#include "xla_plugin/transport/device_channel/operand_memory.h"

#include <cstring>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"
#include "xla_plugin/transport/device_channel/device_channel.h"

namespace jaxhet {
namespace {

// Message of the source to the target; the reason follows if nothing is shared.
struct OperandMemoryInfo {
  uint64_t num_bytes;  // 0: nothing
  uint64_t proof_place;
  uint64_t pull_bytes;
  uint64_t by_handle;  // else by a file descriptor
  IpcHandleInfo handle;
};

}  // namespace

OwnOperandMemory::OwnOperandMemory(Device& device, std::span<std::byte> within, uint64_t pull_bytes,
                                   const FdMailboxInfo& mailbox) {
  OperandMemoryInfo info{};
  std::string why_not;
  try {
    if (!within.empty()) {
      const AddressRange range = device.RangeOf(within.data());
      try {  // only the driver knows how the memory was allocated
        info.handle = device.ExportIpc(within.data());
        info.by_handle = 1;
      } catch (const Error&) {
        LeaveFd(mailbox, device.ExportFd(within.data()));
      }
      range_ = range;
      proof_address_ = within.data();
      info.num_bytes = range.num_bytes;
      info.proof_place =
          static_cast<uint64_t>(within.data() - static_cast<const std::byte*>(range.base));
      info.pull_bytes = pull_bytes;
    }
  } catch (const Error& error) {
    why_not = error.text();
  }
  answer_.assign(reinterpret_cast<const char*>(&info), sizeof info);
  answer_ += why_not;
}

std::optional<uint64_t> OwnOperandMemory::PlaceOf(std::span<const std::byte> operand) const {
  return range_.OffsetOf(operand);
}

void PeerOperandMemory::Open(Device& device, std::string_view answer) {
  OperandMemoryInfo info{};
  if (answer.size() < sizeof info) return;  // the source shares nothing
  std::memcpy(&info, answer.data(), sizeof info);
  const std::string_view why_not = answer.substr(sizeof info);
  if (!why_not.empty()) throw Error(ErrorCode::kTransport, why_not);
  if (info.num_bytes == 0) return;
  if (!InBounds(info.proof_place, kProofBytes, info.num_bytes) || info.pull_bytes == 0) {
    Throw(ErrorCode::kTransport, "the peer's answer is damaged");
  }
  if (info.by_handle != 0) {
    by_handle_ = device.OpenIpc(info.handle);
    base_ = static_cast<const std::byte*>(by_handle_.get());
  } else {
    by_fd_ = device.MapFd(mailbox_.Take(), info.num_bytes);
    base_ = static_cast<const std::byte*>(by_fd_.get().base);
  }
  num_bytes_ = info.num_bytes;
  proof_place_ = info.proof_place;
  pull_bytes_ = info.pull_bytes;
}

void PeerOperandMemory::Close() {
  base_ = nullptr;
  by_handle_ = {};
  by_fd_ = {};
}

const std::byte* PeerOperandMemory::At(uint64_t place, size_t num_bytes) const {
  if (base_ != nullptr && InBounds(place, num_bytes, num_bytes_)) return base_ + place;
  Throw(ErrorCode::kTransport, "the source wants ", num_bytes, " bytes pulled from ", place,
        ", which is not in its memory (", num_bytes_, " bytes)");
}

}  // namespace jaxhet
