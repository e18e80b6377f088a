#include "xla_plugin/transport/shm/shm_ring.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <utility>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"
#include "xla_plugin/transport/shared_memory.h"

namespace jaxhet {
namespace {

constexpr uint32_t kSlots = 8;

// Filled: a slot of the sender of this message holds bytes [offset, offset + num_bytes) of the
// receiver's transfer `ticket`. Freed: the slot of the message's receiver is empty again.
enum class SlotState : uint32_t { kFilled, kFreed };

struct SlotInfo {
  SlotState state;
  uint32_t slot;
  uint64_t ticket;
  uint64_t offset;
  uint64_t num_bytes;
};

class ShmRingConnection final : public Connection {
 public:
  ShmRingConnection(size_t chunk_bytes, ConnectionHost& host)
      : host_(host), chunk_bytes_(chunk_bytes), slots_(CheckedMultiply(kSlots, chunk_bytes)) {
    for (uint32_t slot = 0; slot < kSlots; ++slot) free_.push_back(slot);
  }

  std::string Offer() override { return ToOffer(slots_.info()); }
  void Accept(std::string_view offer) override {
    peer_slots_ = std::make_unique<SharedMemory>(ParseSharedMemoryInfo(offer));
  }
  void Accepted() override { slots_.CloseFd(); }

  void Begin(Transfer& transfer, std::string_view /*announcement*/) override {
    if (transfer.sent < transfer.send.num_bytes()) sends_.push_back(&transfer);
  }

  void OnMessage(std::span<const std::byte> message) override {
    SlotInfo info{};
    if (message.size() != sizeof info) Throw(ErrorCode::kTransport, "a slot message is cut");
    std::memcpy(&info, message.data(), sizeof info);
    if (info.slot >= kSlots) Throw(ErrorCode::kTransport, "there is no slot ", info.slot);
    const auto is_slot = [&](const SlotInfo& other) { return other.slot == info.slot; };
    if (info.state == SlotState::kFreed && std::ranges::count(free_, info.slot) == 0) {
      free_.push_back(info.slot);
    } else if (info.state == SlotState::kFilled && std::ranges::none_of(filled_, is_slot)) {
      filled_.push_back(info);
    } else {
      Throw(ErrorCode::kTransport, "slot ", info.slot, " was filled or freed out of order");
    }
  }

  bool Advance() override {
    if (!filled_.empty()) Drain();
    if (!free_.empty() && !sends_.empty()) Fill();
    return !filled_.empty() || (!free_.empty() && !sends_.empty());
  }

 private:
  void Send(const SlotInfo& info) {
    const iovec message = ObjectIovec(info);
    host_.Send({&message, 1});
  }

  void Fill() {
    Transfer& transfer = *sends_.front();
    const size_t num_bytes = std::min(chunk_bytes_, transfer.send.num_bytes() - transfer.sent);
    const uint32_t slot = free_.back();
    free_.pop_back();
    transfer.send.CopyOut(transfer.sent, {slots_.data() + slot * chunk_bytes_, num_bytes});
    Send({SlotState::kFilled, slot, transfer.peer_ticket, transfer.sent, num_bytes});
    if (transfer.sent + num_bytes == transfer.send.num_bytes()) sends_.pop_front();
    host_.Sent(transfer, num_bytes);
  }

  void Drain() {
    const SlotInfo info = filled_.front();
    filled_.pop_front();
    Transfer& transfer = host_.Find(info.ticket);
    const size_t slot_bytes = peer_slots_->num_bytes() / kSlots;
    if (info.num_bytes == 0 || info.num_bytes > slot_bytes || info.offset != transfer.received ||
        !InBounds(info.offset, info.num_bytes, transfer.receive.num_bytes())) {
      Throw(ErrorCode::kTransport, "a slot's bytes lie outside of the transfer");
    }
    const std::byte* const slot = peer_slots_->data() + info.slot * slot_bytes;
    transfer.receive.CopyIn(info.offset, {slot, info.num_bytes});
    Send({SlotState::kFreed, info.slot, 0, 0, 0});
    host_.Received(transfer, info.num_bytes);
  }

  ConnectionHost& host_;
  size_t chunk_bytes_;
  SharedMemory slots_;  // ours, that we fill
  std::unique_ptr<SharedMemory> peer_slots_;
  std::vector<uint32_t> free_;
  std::deque<Transfer*> sends_;
  std::deque<SlotInfo> filled_;
};

}  // namespace

std::unique_ptr<Connection> OpenShmRing(const TransportSetup& setup, ConnectionHost& host) {
  if (!setup.same_host) Throw(ErrorCode::kTransport, "the processes are on different hosts");
  return std::make_unique<ShmRingConnection>(setup.chunk_bytes, host);
}

}  // namespace jaxhet
