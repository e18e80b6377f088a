#include "xla_plugin/net/socket/path.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string_view>

#include "xla_plugin/base/strings.h"

namespace jaxhet::sockets {
namespace {

using GetName = int (*)(int, sockaddr*, socklen_t*);

struct Free {
  void operator()(ifaddrs* first) const { freeifaddrs(first); }
};

// An IPv4 or IPv6 address as text; empty for other families.
std::string TextOf(const sockaddr& address) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  const void* bytes = nullptr;
  if (address.sa_family == AF_INET) {
    bytes = &reinterpret_cast<const sockaddr_in&>(address).sin_addr;
  } else if (address.sa_family == AF_INET6) {
    bytes = &reinterpret_cast<const sockaddr_in6&>(address).sin6_addr;
  } else {
    return {};
  }
  return inet_ntop(address.sa_family, bytes, text.data(), text.size());
}

std::string AddressOf(int fd, GetName get_name) {
  sockaddr_storage storage{};
  socklen_t size = sizeof storage;
  auto& address = reinterpret_cast<sockaddr&>(storage);
  return get_name(fd, &address, &size) == 0 ? TextOf(address) : std::string();
}

// Name of the interface that has this address; empty if there is none.
std::string InterfaceOf(const std::string& address) {
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) return {};
  const std::unique_ptr<ifaddrs, Free> owner(first);
  for (const ifaddrs* entry = first; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr != nullptr && TextOf(*entry->ifa_addr) == address) return entry->ifa_name;
  }
  return {};
}

constexpr uint32_t kLongUs = 5000;
constexpr int kMostUnsentBytes = 256 << 10;
constexpr std::string_view kByRate = "bbr";

// The shortest round trip so far; 0 if it is unknown.
uint32_t RoundTripUs(int fd) {
  constexpr size_t kMinRtt = 148;  // tcpi_min_rtt in linux/tcp.h, which glibc's header lacks
  uint32_t found = 0;
  std::array<char, kMinRtt + sizeof found> info{};
  socklen_t size = info.size();
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, info.data(), &size) != 0) return 0;  // not of TCP
  std::memcpy(&found, &info[kMinRtt], sizeof found);
  return found == std::numeric_limits<uint32_t>::max() ? 0 : found;
}

}  // namespace

std::string PathName(int fd) {
  const std::string own = AddressOf(fd, &getsockname);
  const std::string peer = AddressOf(fd, &getpeername);
  if (own.empty() || peer.empty()) return {};
  const std::string interface = InterfaceOf(own);
  return StrCat(interface.empty() ? "an unknown interface" : interface, " (", own, " to ", peer,
                ")");
}

bool SetUpLongPath(int fd) {
  if (RoundTripUs(fd) < kLongUs) return false;
  // Both may fail: the socket is slower then.
  setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, kByRate.data(), kByRate.size());
  setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &kMostUnsentBytes, sizeof kMostUnsentBytes);
  return true;
}

}  // namespace jaxhet::sockets
