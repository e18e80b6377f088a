#include "xla_plugin/net/socket/socket.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <utility>
#include <vector>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"

namespace jaxhet {
namespace {

msghdr MessageOf(std::span<const iovec> entries) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(entries.data());
  message.msg_iovlen = std::min<size_t>(entries.size(), IOV_MAX);
  return message;
}

constexpr size_t kReadBytes = size_t{64} << 10;

void AppendFrom(std::string& text, std::span<const iovec> entries, size_t offset) {
  for (const iovec& entry : entries) {
    const std::string_view bytes(static_cast<const char*>(entry.iov_base), entry.iov_len);
    text += bytes.substr(std::min(offset, bytes.size()));
    offset -= std::min(offset, bytes.size());
  }
}

}  // namespace

Socket::Socket(Fd fd, SealKeys keys) : fd_(std::move(fd)) {
  const int flags = fcntl(fd_.get(), F_GETFL);
  if (flags < 0 || fcntl(fd_.get(), F_SETFL, flags | O_NONBLOCK) < 0) ThrowErrno("fcntl(F_SETFL)");
  if (fcntl(fd_.get(), F_SETFD, FD_CLOEXEC) < 0) ThrowErrno("fcntl(F_SETFD)");
  if (keys.encryption == Encryption::kOff) return;
  sealed_ = std::make_unique<Sealed>(
      Sealed{.out = RecordWriter(keys.encryption, std::move(keys.send)),
             .in = RecordReader(keys.encryption, std::move(keys.receive))});
}

void Socket::OnEvents(uint32_t events) {
  constexpr uint32_t kBroken = EPOLLHUP | EPOLLERR;
  readable_ |= !closed() && (events & (EPOLLIN | EPOLLRDHUP | kBroken)) != 0;
  writable_ |= !closed() && (events & (EPOLLOUT | kBroken)) != 0;
}

size_t Socket::Moved(ssize_t result, bool& ready, const char* call) {
  if (result > 0) return static_cast<size_t>(result);
  if (result < 0 && errno == EINTR) return 0;
  ready = false;
  if (result < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return 0;
  close_reason_ = result == 0 ? "end of file" : ErrnoText(call, errno);
  readable_ = writable_ = false;
  return 0;
}

size_t Socket::Read(std::span<const iovec> entries) {
  return sealed_ ? ReadSealed(entries) : ReadRaw(entries);
}

size_t Socket::Write(std::span<const iovec> entries) {
  return sealed_ ? WriteSealed(entries) : WriteRaw(entries);
}

size_t Socket::ReadSealed(std::span<const iovec> entries) {
  while (NumBytes(entries) > 0) {
    const size_t num_bytes = sealed_->in.Take(entries);
    if (num_bytes > 0 || !readable_) return num_bytes;
    const iovec room = sealed_->in.Room();
    sealed_->in.Arrived(ReadRaw({&room, 1}));
  }
  return 0;
}

size_t Socket::WriteSealed(std::span<const iovec> entries) {
  const IoList bytes(entries);
  size_t sealed = 0;
  for (Flush(); writable_ && sealed < bytes.num_bytes(); Flush()) {
    sealed += sealed_->out.Add(bytes, sealed);
  }
  return sealed;
}

void Socket::Flush() {
  if (!sealed_) return;
  while (writable_ && !sealed_->out.unsent().empty()) {
    const iovec unsent = ToIovec(sealed_->out.unsent().data(), sealed_->out.unsent().size());
    sealed_->out.Sent(WriteRaw({&unsent, 1}));
  }
  if (sealed_->shut_down && is_flushed()) ShutdownWrite();
}

size_t Socket::ReadRaw(std::span<const iovec> entries) {
  if (!readable_) return 0;
  msghdr message = MessageOf(entries);
  return Moved(recvmsg(fd_.get(), &message, 0), readable_, "recvmsg");
}

size_t Socket::WriteRaw(std::span<const iovec> entries) {
  if (!writable_ || closed()) return 0;
  const msghdr message = MessageOf(entries);
  const ssize_t result = sendmsg(fd_.get(), &message, MSG_NOSIGNAL);
  // A peer that is gone may have left words to read: only reading decides that the end has come.
  if (result < 0 && (errno == EPIPE || errno == ECONNRESET)) {
    writable_ = false;
    send_failure_ = ErrnoText("send", errno);
    return 0;
  }
  return Moved(result, writable_, "sendmsg");
}

void Socket::ShutdownWrite() {
  if (sealed_) {
    sealed_->shut_down = !is_flushed();
    if (sealed_->shut_down) return;
  }
  writable_ = false;
  shutdown(fd_.get(), SHUT_WR);
}

void ControlChannel::Send(uint32_t type, std::span<const iovec> body) {
  if (finished_) return;
  const MessageInfo info{kMessageMagic, type, NumBytes(body)};
  if (info.body_bytes > kMaxBodyBytes) {
    Throw(ErrorCode::kUsage, "a message of ", info.body_bytes, " bytes is longer than allowed");
  }
  std::vector<iovec> entries = {ObjectIovec(info)};
  entries.insert(entries.end(), body.begin(), body.end());
  const size_t sent = socket_ && unsent_.empty() ? socket_->Write(entries) : 0;
  AppendFrom(unsent_, entries, sent);
}

void ControlChannel::Send(uint32_t type, std::string_view body) {
  const iovec entry = ToIovec(body.data(), body.size());
  Send(type, {&entry, 1});
}

void ControlChannel::Flush() {
  if (socket_) socket_->Flush();
  if (!socket_ || unsent_.empty()) return;
  const iovec entry = ToIovec(unsent_.data(), unsent_.size());
  unsent_.erase(0, socket_->Write({&entry, 1}));
  if (unsent_.empty() && finished_) socket_->ShutdownWrite();
}

void ControlChannel::FinishSending() {
  if (std::exchange(finished_, true)) return;
  if (socket_ && unsent_.empty()) socket_->ShutdownWrite();
}

std::optional<Message> ControlChannel::Next() {
  std::optional<Message> message = Parse();
  while (!message && ReadMore()) message = Parse();
  return message;
}

std::optional<Message> ControlChannel::Parse() {
  std::string_view rest = std::string_view(received_).substr(parsed_);
  if (rest.size() < sizeof(MessageInfo)) return std::nullopt;
  const auto info = Take<MessageInfo>(rest, "a message");
  if (info.magic != kMessageMagic || info.body_bytes > kMaxBodyBytes) {
    Throw(ErrorCode::kTransport, "what arrived is not a message of this version of jaxhet");
  }
  if (rest.size() < info.body_bytes) return std::nullopt;
  parsed_ += sizeof info + info.body_bytes;
  return Message{info.type, rest.substr(0, info.body_bytes)};
}

bool ControlChannel::ReadMore() {
  received_.erase(0, std::exchange(parsed_, 0));
  if (!socket_) {
    received_ += unsent_;
    return !std::exchange(unsent_, {}).empty();
  }
  if (!socket_->readable()) return false;
  std::array<char, kReadBytes> buffer;  // NOLINT(cppcoreguidelines-pro-type-member-init): 64 KiB
  const iovec entry = ToIovec(buffer.data(), buffer.size());
  const size_t num_bytes = socket_->Read({&entry, 1});
  received_.append(buffer.data(), num_bytes);
  return num_bytes > 0;
}

}  // namespace jaxhet
