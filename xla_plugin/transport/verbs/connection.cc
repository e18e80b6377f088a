#include "xla_plugin/transport/verbs/connection.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"
#include "xla_plugin/transport/verbs/verbs.h"

namespace jaxhet::verbs {
namespace {

// A message is divided among queue pairs into chunks that are not shorter.
constexpr size_t kLeastChunkBytes = size_t{64} << 10;
constexpr size_t kAlignment = 128;
constexpr size_t kPageBytes = 4096;

size_t NumSlots(Nics& nics) {
  return std::min(static_cast<size_t>(nics.options().depth) * nics.Usable().size(),
                  SlotLink::kMostSlots);
}

// Largest chunk that fits one work request of every NIC, with its header.
size_t ChunkBytes(Nics& nics, size_t wanted) {
  for (const auto& nic : nics.Usable()) {
    wanted = std::min<size_t>(wanted, nic->info.max_message - kChunkHeaderBytes);
  }
  return wanted;
}

size_t SlotBytes(Nics& nics, size_t chunk_bytes) {
  return RoundUp(kChunkHeaderBytes + ChunkBytes(nics, chunk_bytes), kPageBytes);
}

}  // namespace

VerbsConnection::VerbsConnection(Nics& nics, size_t chunk_bytes, ConnectionHost& host)
    : host_(host),
      outgoing_(nics.Usable(), NumSlots(nics), SlotBytes(nics, chunk_bytes),
                ibv::kAccessLocalWrite),
      incoming_(nics.Usable(), NumSlots(nics), SlotBytes(nics, chunk_bytes),
                ibv::kAccessLocalWrite | ibv::kAccessRemoteWrite),
      link_(nics.Usable(), nics.options(),
            {.outgoing = outgoing_.slots(),
             .incoming = incoming_.slots(),
             .count = NumSlots(nics),
             .chunk_bytes = ChunkBytes(nics, chunk_bytes)},
            host) {}

void VerbsConnection::Begin(Transfer& transfer, std::string_view /*announcement*/) {
  if (transfer.sent < transfer.send.num_bytes()) sends_.push_back(&transfer);
}

bool VerbsConnection::Advance() {
  link_.Poll();
  size_t moved = 0;
  while (moved < kSliceBytes) {
    const size_t drained = Drain();
    if (link_.num_credits_due() * 2 >= link_.num_slots()) link_.SendCredits();
    const size_t sent = Send();
    if (drained + sent == 0) break;
    moved += drained + sent;
  }
  if (link_.HasArrivals() || CanSend() || link_.IsBusy()) return true;
  link_.SendCredits();
  if (!link_.Arm()) return false;
  link_.Poll();
  return link_.HasArrivals() || CanSend();
}

// Copies one chunk out; returns its bytes.
size_t VerbsConnection::Drain() {
  if (!link_.HasArrivals()) return 0;
  const size_t slot = link_.FirstArrival().slot;
  const std::byte* const memory = incoming_.slot(slot);
  ChunkInfo info{};
  std::memcpy(&info, memory, sizeof info);
  Transfer& transfer = host_.Find(info.ticket);
  if (info.sequence != link_.sequence_of_arrived(slot) || info.num_bytes == 0 ||
      info.num_bytes > link_.chunk_bytes() ||
      !InBounds(info.offset, info.num_bytes, transfer.receive.num_bytes())) {
    Throw(ErrorCode::kTransport, "a chunk's bytes lie outside of the transfer");
  }
  if (!transfer.reserved.Add(info.offset, info.num_bytes, transfer.receive.num_bytes())) {
    Throw(ErrorCode::kTransport, kBytesTwice);
  }
  link_.OnCredits(info.credits);
  transfer.receive.CopyIn(info.offset, {memory + kChunkHeaderBytes, info.num_bytes});
  link_.TakeArrival();
  link_.Empty(slot);
  host_.Received(transfer, info.num_bytes);
  return info.num_bytes;
}

bool VerbsConnection::CanSend() {
  return (link_.HasResends() || (!sends_.empty() && link_.AnyFree())) && link_.HasRoom();
}

// Sends one chunk; returns its bytes.
size_t VerbsConnection::Send() {
  if (!CanSend()) return 0;
  if (link_.HasResends()) return link_.Resend();
  const std::optional<size_t> slot = link_.AnyFree();
  return slot ? Fill(*slot) : 0;
}

size_t VerbsConnection::Fill(size_t slot) {
  Transfer& transfer = *sends_.front();
  const size_t num_bytes =
      std::min(ChunkBytesOf(transfer.send.num_bytes()), transfer.send.num_bytes() - transfer.sent);
  const size_t slot_bytes = kChunkHeaderBytes + num_bytes;
  const uint32_t sequence = link_.Start(slot, slot_bytes);
  std::byte* const memory = outgoing_.slot(slot);
  ChunkInfo info{transfer.peer_ticket, transfer.sent, num_bytes, sequence, {}};
  link_.TakeCredits(info.credits);
  std::memcpy(memory, &info, sizeof info);
  const size_t part = SlotLink::PartBytes(slot_bytes);
  size_t begin = 0;
  for (size_t end = 0; begin < slot_bytes; begin = end) {
    end = std::min(begin + part, slot_bytes);
    const size_t first = std::max(begin, kChunkHeaderBytes);
    transfer.send.CopyOut(transfer.sent + first - kChunkHeaderBytes, {memory + first, end - first});
    link_.SendTo(slot, end);
  }
  if (transfer.sent + num_bytes == transfer.send.num_bytes()) sends_.pop_front();
  host_.Sent(transfer, num_bytes);
  return num_bytes;
}

// Size of the chunks of a message of `num_bytes`, so that every queue pair has some.
size_t VerbsConnection::ChunkBytesOf(size_t num_bytes) const {
  const size_t even = RoundUp(num_bytes / link_.num_data_qps(), kAlignment);
  return std::clamp(even, std::min(kLeastChunkBytes, link_.chunk_bytes()), link_.chunk_bytes());
}

}  // namespace jaxhet::verbs

namespace jaxhet {

std::unique_ptr<Connection> OpenVerbs(const TransportSetup& setup, ConnectionHost& host) {
  RefuseSealing(setup.encryption);
  return std::make_unique<verbs::VerbsConnection>(*setup.nics, setup.chunk_bytes, host);
}

}  // namespace jaxhet
