#include "tests/softverbs/library/wire.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <utility>

#include "xla_plugin/base/error.h"
#include "xla_plugin/base/io_list.h"

namespace jaxhet::softverbs {
namespace {

constexpr int kBacklog = 64;

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

Fd NewSocket() { return Fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)); }

bool WouldBlock() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

}  // namespace

std::string Wire::NameOf(uint32_t process) const {
  return StrCat("softverbs-", fabric_, "-", process);
}

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

bool Wire::Send(uint32_t process, const Packet& packet) {
  auto [found, is_new] = outgoing_.try_emplace(process);
  Link& link = found->second;
  if (is_new) {
    link.fd = NewSocket();
    const Address address = AbstractAddress(NameOf(process));
    if (connect(link.fd.get(), Raw(address), address.size) != 0) {
      outgoing_.erase(found);
      return false;
    }
  }
  link.queue.push_back(packet);
  if (Flush(link)) return true;
  outgoing_.erase(found);
  return false;
}

bool Wire::Flush(Link& link) {
  while (!link.queue.empty()) {
    const Packet& packet = link.queue.front();
    std::array<iovec, 2> entries = {ObjectIovec(packet.info),
                                    ToIovec(packet.bytes.data(), packet.bytes.size())};
    msghdr message{};
    message.msg_iov = entries.data();
    message.msg_iovlen = entries.size();
    if (sendmsg(link.fd.get(), &message, MSG_NOSIGNAL) < 0) return WouldBlock();
    link.queue.pop_front();
  }
  return true;
}

bool Wire::Read(const Fd& fd, std::vector<Packet>& packets) {
  while (true) {
    Packet packet;
    packet.bytes.resize(kPacketBytes);
    std::array<iovec, 2> entries = {ObjectIovec(packet.info),
                                    ToIovec(packet.bytes.data(), packet.bytes.size())};
    msghdr message{};
    message.msg_iov = entries.data();
    message.msg_iovlen = entries.size();
    const ssize_t num_bytes = recvmsg(fd.get(), &message, 0);
    if (num_bytes < 0) return WouldBlock();
    if (std::cmp_less(num_bytes, sizeof packet.info)) return false;
    packet.bytes.resize(static_cast<size_t>(num_bytes) - sizeof packet.info);
    packets.push_back(std::move(packet));
  }
}

std::vector<Packet> Wire::Receive(const std::function<void(uint32_t)>& lost) {
  while (true) {
    Fd fd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd) break;
    incoming_.push_back(std::move(fd));
  }
  std::vector<Packet> packets;
  std::erase_if(incoming_, [&](const Fd& fd) { return !Read(fd, packets); });
  std::vector<uint32_t> gone;
  for (auto& [process, link] : outgoing_) {
    pollfd state{.fd = link.fd.get(), .events = 0, .revents = 0};
    const bool hung_up = poll(&state, 1, 0) == 1;
    if (hung_up || !Flush(link)) gone.push_back(process);
  }
  for (const uint32_t process : gone) {
    outgoing_.erase(process);
    lost(process);
  }
  return packets;
}

void Wire::AppendFds(std::vector<pollfd>& fds) const {
  const auto add = [&](const Fd& fd, short events) {
    fds.push_back({.fd = fd.get(), .events = events, .revents = 0});
  };
  add(listener_, POLLIN);
  for (const Fd& fd : incoming_) add(fd, POLLIN);
  for (const auto& [process, link] : outgoing_) {
    add(link.fd, link.queue.empty() ? short{0} : short{POLLOUT});
  }
}

std::vector<uint32_t> Wire::OtherProcesses() const {
  const std::string prefix = StrCat("@softverbs-", fabric_, "-");
  std::vector<uint32_t> processes;
  std::ifstream table("/proc/net/unix");
  for (std::string line; std::getline(table, line);) {
    const size_t at = line.find(prefix);
    if (at == std::string::npos) continue;
    uint32_t process = 0;
    const char* const end = line.data() + line.size();
    const auto parsed = std::from_chars(line.data() + at + prefix.size(), end, process);
    if (parsed.ptr == end && process != process_) processes.push_back(process);
  }
  std::ranges::sort(processes);
  const auto doubles = std::ranges::unique(processes);
  processes.erase(doubles.begin(), doubles.end());
  return processes;
}

}  // namespace jaxhet::softverbs
