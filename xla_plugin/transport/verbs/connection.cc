#include "xla_plugin/transport/verbs/connection.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"
#include "xla_plugin/transport/verbs/verbs.h"
#include "xla_plugin/transport/verbs/wc_status.h"

namespace jaxhet::verbs {
namespace {

// A chunk is sent while the rest of it is copied: in so many writes at most, none shorter.
constexpr size_t kMaxFragments = 4;
constexpr size_t kFragmentBytes = size_t{128} << 10;
// A message is divided among paths into pieces that are not shorter.
constexpr size_t kLeastPieceBytes = size_t{64} << 10;
constexpr size_t kAlignment = 128;
// Completions are polled for so long after the last one, before an event is waited for.
constexpr std::chrono::microseconds kSpin{50};

constexpr size_t RoundUp(size_t value) {
  return (value + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

std::vector<Pollable*> VerbsConnection::Pollables() {
  std::vector<Pollable*> pollables;
  for (Rail& rail : rails_) {
    pollables.push_back(&rail.cq);
    pollables.push_back(rail.nic->context.get());
  }
  return pollables;
}

void VerbsConnection::Begin(Transfer& transfer, std::string_view /*announcement*/) {
  if (transfer.sent < transfer.send.num_bytes()) sends_.push_back(&transfer);
}

bool VerbsConnection::Advance() {
  LookAtNics();
  Poll();
  size_t moved = 0;
  while (moved < kSliceBytes) {
    const size_t drained = Drain();
    SendCredits();
    const size_t sent = Send();
    if (drained + sent == 0) break;
    moved += drained + sent;
  }
  const bool has_work = !filled_.empty() || CanSend();
  if (has_work || Clock::now() - last_completion_ < kSpin) return true;
  if (!Arm()) return false;
  Poll();
  return !filled_.empty() || CanSend();
}

bool VerbsConnection::Arm() {
  bool armed = false;
  for (Rail& rail : rails_) armed |= rail.cq.Arm();
  return armed;
}

void VerbsConnection::Poll() {
  for (Rail& rail : rails_) {
    std::array<ibv::Wc, 32> buffer;
    std::span<const ibv::Wc> completions;
    do {
      completions = rail.cq.Poll(buffer);
      for (const ibv::Wc& wc : completions) OnCompletion(rail, wc);
    } while (completions.size() == buffer.size());
  }
}

void VerbsConnection::OnCompletion(Rail& rail, const ibv::Wc& wc) {
  last_completion_ = Clock::now();
  const WorkId id = UnpackWorkId(wc.wr_id);
  Path& path = *PathOf(id.path).path;
  if (id.epoch != path.epoch()) return;  // of a queue pair that has been replaced
  if (wc.status != ibv::kWcSuccess) {
    if (path.state() == Path::State::kClosing || path.state() == Path::State::kDead) return;
    if (IsFatal(wc.status)) {
      Throw(ErrorCode::kTransport, rail.name, ": ", Describe(wc),
            ": this is an error in jaxhet or its peer; please report it");
    }
    return ClosePath(rail, path, Describe(wc));
  }
  if (id.is_receive) {
    if (const int error = path.Restock()) ClosePath(rail, path, ErrnoText("ibv_post_recv", error));
    return OnImmediate(UnpackImmediate(wc.imm_data));
  }
  const int slot = path.OnSent();
  if (slot == kNoSlot) return;
  slots_[static_cast<size_t>(slot)].is_posted = false;
  FreeIfDone(static_cast<size_t>(slot));
}

void VerbsConnection::OnImmediate(Immediate immediate) {
  if (immediate.slot >= slots_.size()) {
    Throw(ErrorCode::kTransport, "there is no slot ", int{immediate.slot});
  }
  if (immediate.kind == ImmediateKind::kCredit) {
    return OnCredit(immediate.slot, immediate.sequence);
  }
  PeerSlot& slot = peer_slots_[immediate.slot];
  const auto ahead = static_cast<int16_t>(immediate.sequence - slot.filled);
  // Sent again although it had arrived; another NIC's completions may have told of the next one.
  if (ahead <= 0) return;
  if (ahead != 1 || slot.filled != slot.emptied) {
    Throw(ErrorCode::kTransport, "slot ", int{immediate.slot}, " was filled out of turn");
  }
  slot.filled = immediate.sequence;
  filled_.push_back(immediate.slot);
}

void VerbsConnection::OnCredit(size_t index, uint16_t sequence) {
  Slot& slot = slots_[index];
  if (slot.is_emptied || slot.sequence != sequence) return;  // known already
  slot.is_emptied = true;
  FreeIfDone(index);
}

void VerbsConnection::FreeIfDone(size_t index) {
  Slot& slot = slots_[index];
  if (!slot.IsFree()) return;
  slot.path = nullptr;
  std::erase(resends_, index);
  free_.push_back(index);
}

// Copies one chunk out; returns its bytes.
size_t VerbsConnection::Drain() {
  if (filled_.empty()) return 0;
  const size_t index = filled_.front();
  PeerSlot& slot = peer_slots_[index];
  const std::byte* const memory = incoming_.slot(index);
  ChunkInfo info{};
  std::memcpy(&info, memory, sizeof info);
  Transfer& transfer = host_.Find(info.ticket);
  if (info.sequence != slot.filled || info.num_bytes == 0 || info.num_bytes > chunk_bytes_ ||
      !InBounds(info.offset, info.num_bytes, transfer.receive.num_bytes())) {
    Throw(ErrorCode::kTransport, "a chunk's bytes lie outside of the transfer");
  }
  const iovec from = ToIovec(memory + kChunkHeaderBytes, info.num_bytes);
  CopyPieces(transfer.receive.Cut(info.offset, info.num_bytes), {&from, 1});
  filled_.pop_front();
  slot.emptied = slot.filled;
  credits_due_.push_back(index);
  host_.Received(transfer, info.num_bytes);
  return info.num_bytes;
}

void VerbsConnection::SendCredits() {
  while (!credits_due_.empty()) {
    const auto [rail, path] = ChoosePath(/*for_credits=*/true, 1);
    if (path == nullptr) return;
    const size_t slot = credits_due_.front();
    credits_due_.pop_front();
    const Write nothing{.to = peer_slots_address_, .rkey = rail->peer_rkey};
    const Immediate immediate{ImmediateKind::kCredit, static_cast<uint8_t>(slot),
                              peer_slots_[slot].emptied};
    const int error = path->PostLast(nothing, immediate, kNoSlot);
    // Closing the path repeats the credit.
    if (error != 0) ClosePath(*rail, *path, ErrnoText("ibv_post_send", error));
  }
}

bool VerbsConnection::CanSend() {
  const bool has_chunk = !resends_.empty() || (!sends_.empty() && !free_.empty());
  return has_chunk && ChoosePath(/*for_credits=*/false, kMaxFragments).path != nullptr;
}

// Sends one chunk; returns its bytes.
size_t VerbsConnection::Send() {
  if (!CanSend()) return 0;
  const auto [rail, path] = ChoosePath(/*for_credits=*/false, kMaxFragments);
  if (resends_.empty()) return Fill(*rail, *path);
  const size_t slot = resends_.front();
  resends_.pop_front();
  slots_[slot].path = path;
  PostFrom(*rail, *path, slot, 0, slots_[slot].num_bytes);
  return slots_[slot].num_bytes;
}

size_t VerbsConnection::Fill(Rail& rail, Path& path) {
  Transfer& transfer = *sends_.front();
  const size_t num_bytes =
      std::min(PieceBytes(transfer.send.num_bytes()), transfer.send.num_bytes() - transfer.sent);
  const size_t index = free_.back();
  free_.pop_back();
  Slot& slot = slots_[index];
  ++slot.sequence;
  slot.num_bytes = static_cast<uint32_t>(kChunkHeaderBytes + num_bytes);
  slot.is_emptied = false;
  slot.path = &path;
  std::byte* const memory = outgoing_.slot(index);
  const ChunkInfo info{transfer.peer_ticket, transfer.sent, num_bytes, slot.sequence, 0};
  std::memcpy(memory, &info, sizeof info);
  const size_t fragment = std::max(kFragmentBytes, RoundUp(slot.num_bytes / kMaxFragments));
  size_t begin = 0;
  for (size_t end = 0; begin < slot.num_bytes; begin = end) {
    end = std::min<size_t>(begin + fragment, slot.num_bytes);
    const size_t first = std::max(begin, kChunkHeaderBytes);
    const iovec to = ToIovec(memory + first, end - first);
    CopyPieces({&to, 1}, transfer.send.Cut(transfer.sent + first - kChunkHeaderBytes, end - first));
    PostFrom(rail, path, index, begin, end);
  }
  if (transfer.sent + num_bytes == transfer.send.num_bytes()) sends_.pop_front();
  host_.Sent(transfer, num_bytes);
  return num_bytes;
}

// Sends [begin, end) of a slot. Where that fails, closing the path will send all of it again.
void VerbsConnection::PostFrom(Rail& rail, Path& path, size_t index, size_t begin, size_t end) {
  Slot& slot = slots_[index];
  if (slot.path != &path || !path.is_live()) return;
  const Write write{.from = reinterpret_cast<uint64_t>(outgoing_.slot(index)) + begin,
                    .lkey = rail.outgoing.lkey(),
                    .num_bytes = static_cast<uint32_t>(end - begin),
                    .to = peer_slots_address_ + index * peer_slot_bytes_ + begin,
                    .rkey = rail.peer_rkey};
  const Immediate immediate{ImmediateKind::kChunk, static_cast<uint8_t>(index), slot.sequence};
  slot.is_posted = true;
  const int error = end == slot.num_bytes ? path.PostLast(write, immediate, static_cast<int>(index))
                                          : path.PostFragment(write);
  if (error != 0) ClosePath(rail, path, ErrnoText("ibv_post_send", error));
}

// Of a message of `num_bytes`, so that all paths have some of it.
size_t VerbsConnection::PieceBytes(size_t num_bytes) const {
  const size_t num_paths = rails_.size() * (rails_.front().paths.size() - 1);
  return std::clamp(RoundUp(num_bytes / num_paths), std::min(kLeastPieceBytes, chunk_bytes_),
                    chunk_bytes_);
}

// The live path with room for `num_sends` that has the least to do; one that was not made for the
// purpose if there is no other.
VerbsConnection::Choice VerbsConnection::ChoosePath(bool for_credits, uint32_t num_sends) {
  Choice best;
  std::pair<bool, size_t> least;
  for (Rail& rail : rails_) {
    for (Path& path : rail.paths) {
      if (!path.is_live() || !path.HasRoom(num_sends)) continue;
      const bool is_for_credits = &path == &rail.paths.front();
      const std::pair cost{is_for_credits != for_credits, path.bytes_in_flight()};
      if (best.path != nullptr && least <= cost) continue;
      best = {&rail, &path};
      least = cost;
    }
  }
  return best;
}

}  // namespace jaxhet::verbs

namespace jaxhet {

std::unique_ptr<Connection> OpenVerbs(const TransportSetup& setup, ConnectionHost& host) {
  return std::make_unique<verbs::VerbsConnection>(*setup.nics, setup.chunk_bytes, host);
}

}  // namespace jaxhet
