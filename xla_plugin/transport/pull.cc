#include "xla_plugin/transport/pull.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"

namespace jaxhet {
namespace {

struct SegmentInfo {
  uint64_t address;
  uint64_t num_bytes;
};

IoList ParseSegments(std::string_view text, size_t num_bytes) {
  IoList source;
  for (; text.size() >= sizeof(SegmentInfo); text.remove_prefix(sizeof(SegmentInfo))) {
    SegmentInfo segment{};
    std::memcpy(&segment, text.data(), sizeof segment);
    if (!InBounds(source.num_bytes(), segment.num_bytes, num_bytes)) break;
    source.Add(reinterpret_cast<const void*>(segment.address), segment.num_bytes);
  }
  if (!text.empty() || source.num_bytes() != num_bytes) {
    Throw(ErrorCode::kTransport, "the announced segments do not add up to ", num_bytes, " bytes");
  }
  return source;
}

class LocalConnection final : public PullConnection {
 public:
  using PullConnection::PullConnection;

 private:
  size_t Copy(std::span<const iovec> to, std::span<const iovec> from) override {
    return CopyEntries(to, from);
  }
  bool SourceIsAlive() override { return true; }
};

}  // namespace

std::string PullConnection::Announce(const Transfer& transfer) {
  std::string text;
  for (const iovec& entry : transfer.send.entries()) {
    const SegmentInfo segment{reinterpret_cast<uint64_t>(entry.iov_base), entry.iov_len};
    text.append(reinterpret_cast<const char*>(&segment), sizeof segment);
  }
  return text;
}

void PullConnection::Begin(Transfer& transfer, std::string_view announcement) {
  if (transfer.received == transfer.receive.num_bytes()) return;
  pulls_.push_back({&transfer, ParseSegments(announcement, transfer.receive.num_bytes())});
}

bool PullConnection::Advance() {
  if (pulls_.empty()) return false;
  auto& [transfer_pointer, source] = pulls_.front();
  Transfer& transfer = *transfer_pointer;
  const size_t slice = std::min(kSliceBytes, source.num_bytes() - transfer.received);
  const size_t num_bytes =
      Copy(transfer.receive.Cut(transfer.received, slice), source.Cut(transfer.received, slice));
  if (num_bytes == 0) return false;
  if (transfer.received + num_bytes == source.num_bytes()) {
    if (!SourceIsAlive()) return false;
    pulls_.pop_front();
    const iovec ticket = ObjectIovec(transfer.peer_ticket);
    host_.Send({&ticket, 1});
  }
  host_.Received(transfer, num_bytes);
  return !pulls_.empty();
}

void PullConnection::OnMessage(std::span<const std::byte> message) {
  uint64_t ticket = 0;
  if (message.size() != sizeof ticket) Throw(ErrorCode::kTransport, "a pull's receipt is cut");
  std::memcpy(&ticket, message.data(), sizeof ticket);
  Transfer& transfer = host_.Find(ticket);
  host_.Sent(transfer, transfer.send.num_bytes() - transfer.sent);
}

std::unique_ptr<Connection> OpenLocal(ConnectionHost& host) {
  return std::make_unique<LocalConnection>(host);
}

}  // namespace jaxhet
