#include "tests/softverbs/library/wire.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <iterator>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"

namespace jaxhet::softverbs {
namespace {

constexpr int kBacklog = 64;
constexpr uint32_t kMaxProcesses = 1 << 12;
constexpr size_t kReadBytes = 256 << 10;

struct Address {
  sockaddr_un data{.sun_family = AF_UNIX, .sun_path = {}};
  socklen_t size = 0;
};

Address AbstractAddress(const std::string& name) {
  Address address;
  const size_t length = std::min(name.size(), sizeof address.data.sun_path - 1);
  std::memcpy(address.data.sun_path + 1, name.data(), length);
  address.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
  return address;
}

const sockaddr* Raw(const Address& address) {
  return reinterpret_cast<const sockaddr*>(&address.data);
}

Fd NewSocket() { return Fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)); }

bool WouldBlock() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

}  // namespace

std::string Wire::NameOf(uint32_t process) { return StrCat("softverbs-", process); }

void Wire::Open() {
  const auto first = static_cast<uint32_t>(getpid());
  for (uint32_t i = 0; i < kMaxProcesses - 1; ++i) {
    process_ = 1 + (first + i) % (kMaxProcesses - 1);
    listener_ = NewSocket();
    const Address address = AbstractAddress(NameOf(process_));
    if (bind(listener_.get(), Raw(address), address.size) != 0) continue;
    if (listen(listener_.get(), kBacklog) == 0) return;
  }
  ThrowErrno("softverbs: bind");
}

void Wire::Close() {
  listener_.Reset();
  incoming_.clear();
  outgoing_.clear();
}

bool Wire::Send(Message message) {
  const uint32_t process = message.info.to_qpn / kQpsOfProcess;
  auto [found, is_new] = outgoing_.try_emplace(process);
  Link& link = found->second;
  message.info.num_bytes = CheckedCast<uint32_t>(message.bytes.size());
  const auto* const info = reinterpret_cast<const std::byte*>(&message.info);
  link.bytes.insert(link.bytes.end(), info, info + sizeof message.info);
  link.bytes.insert(link.bytes.end(), message.bytes.begin(), message.bytes.end());
  const Address address = AbstractAddress(NameOf(process));
  if (is_new) link.fd = NewSocket();
  if ((!is_new || connect(link.fd.get(), Raw(address), address.size) == 0) && Flush(link)) {
    return true;
  }
  outgoing_.erase(found);
  return false;
}

bool Wire::Flush(Link& link) {
  if (link.bytes.empty()) return true;
  const ssize_t sent = send(link.fd.get(), link.bytes.data(), link.bytes.size(), MSG_NOSIGNAL);
  if (sent < 0) return WouldBlock();
  link.bytes.erase(link.bytes.begin(), link.bytes.begin() + sent);
  return true;
}

bool Wire::Read(Link& link, std::vector<Message>& messages) {
  std::array<std::byte, kReadBytes> buffer;
  const ssize_t count = recv(link.fd.get(), buffer.data(), buffer.size(), 0);
  if (count <= 0) return count < 0 && WouldBlock();
  std::vector<std::byte>& bytes = link.bytes;
  bytes.insert(bytes.end(), buffer.begin(), buffer.begin() + count);
  while (bytes.size() >= sizeof(MessageInfo)) {
    Message message;
    std::memcpy(&message.info, bytes.data(), sizeof message.info);
    const auto begin = bytes.begin() + sizeof message.info;
    const auto end = begin + message.info.num_bytes;
    if (std::cmp_less(bytes.end() - begin, message.info.num_bytes)) break;
    message.bytes.assign(begin, end);
    bytes.erase(bytes.begin(), end);
    messages.push_back(std::move(message));
  }
  return true;
}

std::vector<Message> Wire::Receive() {
  while (true) {
    Fd fd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd) break;
    incoming_.push_back({std::move(fd), {}});
  }
  for (auto link = outgoing_.begin(); link != outgoing_.end();) {
    link = Flush(link->second) ? std::next(link) : outgoing_.erase(link);
  }
  std::vector<Message> messages;
  incoming_.remove_if([&](Link& link) { return !Read(link, messages); });
  return messages;
}

void Wire::AppendFds(std::vector<pollfd>& fds) const {
  const auto add = [&](const Fd& fd, short events) {
    fds.push_back({.fd = fd.get(), .events = events, .revents = 0});
  };
  add(listener_, POLLIN);
  for (const Link& link : incoming_) add(link.fd, POLLIN);
  for (const auto& [process, link] : outgoing_) {
    if (!link.bytes.empty()) add(link.fd, POLLOUT);
  }
}

}  // namespace jaxhet::softverbs
