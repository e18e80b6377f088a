#ifndef XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_OPERAND_MEMORY_H_
#define XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_OPERAND_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "xla_plugin/device/device.h"
#include "xla_plugin/transport/device_channel/fd_mailbox.h"

namespace jaxhet {

// The allocation that a source's operands lie in (XLA's arena), shared with a target on this host,
// whose device can then pull out of it. Places are offsets in it.

// The source's side.
class OwnOperandMemory {
 public:
  // `within` is some of that memory; empty: no memory is shared. Never throws for what can't be
  // shared: answer() says why.
  OwnOperandMemory(Device& device, std::span<std::byte> within, uint64_t pull_bytes,
                   const FdMailboxInfo& mailbox);

  const std::string& answer() const { return answer_; }
  bool is_shared() const { return range_.num_bytes > 0; }
  // Address that a proof is written to.
  void* proof_address() const { return proof_address_; }
  std::optional<uint64_t> PlaceOf(std::span<const std::byte> operand) const;

 private:
  AddressRange range_{};
  void* proof_address_ = nullptr;
  std::string answer_;
};

// The target's.
class PeerOperandMemory {
 public:
  const FdMailboxInfo& mailbox() const { return mailbox_.info(); }
  // The source's answer. Throws for what can't be opened here.
  void Open(Device& device, std::string_view answer);
  void Close();
  // Set-up is over.
  void Settle() { mailbox_.Close(); }

  bool is_open() const { return base_ != nullptr; }
  uint64_t pull_bytes() const { return pull_bytes_; }
  const std::byte* proof_address() const { return base_ + proof_place_; }
  // Throws TransportError if the bytes are not in there.
  const std::byte* At(uint64_t place, size_t num_bytes) const;

 private:
  FdMailbox mailbox_;
  IpcMemory by_handle_;
  MappedMemory by_fd_;
  const std::byte* base_ = nullptr;
  uint64_t num_bytes_ = 0;
  uint64_t proof_place_ = 0;
  uint64_t pull_bytes_ = 0;
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_OPERAND_MEMORY_H_
