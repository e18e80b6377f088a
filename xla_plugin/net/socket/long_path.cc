#include "xla_plugin/net/socket/long_path.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string_view>

namespace jaxhet::sockets {
namespace {

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

bool SetUpLongPath(int fd) {
  if (RoundTripUs(fd) < kLongUs) return false;
  // Both may fail: the socket is slower then.
  setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, kByRate.data(), kByRate.size());
  setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &kMostUnsentBytes, sizeof kMostUnsentBytes);
  return true;
}

}  // namespace jaxhet::sockets
