#include "xla_plugin/net/socket/long_path.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <string_view>
#include <utility>

namespace jaxhet::sockets {
namespace {

constexpr std::chrono::microseconds kLong{5000};
constexpr int kMostUnsentBytes = 256 << 10;
constexpr std::string_view kByRate = "bbr";
constexpr int kRoundTripsOfReading = 3;
constexpr double kGrowth = 1.25;    // from one reading to the next, as in BBR's start
constexpr double kHeadroom = 1.08;  // for packets sent again, and to find a higher rate

// Words of tcp_info in linux/tcp.h. glibc's header lacks the last two.
struct TcpInfo {
  static constexpr size_t kSegmentBytes = 16;
  static constexpr size_t kLeastRoundTripUs = 148;
  static constexpr size_t kDelivered = 192;
  static constexpr size_t kNumBytes = 196;

  explicit TcpInfo(int fd) {
    socklen_t size = kNumBytes;
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, bytes.data(), &size) != 0) bytes = {};  // not of TCP
  }
  uint32_t Word(size_t at) const {
    uint32_t found = 0;
    std::memcpy(&found, &bytes[at], sizeof found);
    return found;
  }

  std::array<char, kNumBytes> bytes{};
};

}  // namespace

bool LongPath::Add(int fd) {
  const uint32_t least = TcpInfo(fd).Word(TcpInfo::kLeastRoundTripUs);
  const std::chrono::microseconds round_trip{least};
  const bool is_known = least != std::numeric_limits<uint32_t>::max();
  if (!is_known || round_trip < kLong) return false;
  // Both may fail: the socket is slower then.
  setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, kByRate.data(), kByRate.size());
  setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &kMostUnsentBytes, sizeof kMostUnsentBytes);
  round_trip_ = std::max(round_trip_, round_trip);
  sockets_.push_back(fd);
  return true;
}

void LongPath::Observe(Clock::time_point now, bool is_waiting) {
  if (sockets_.empty()) return;
  if (!is_waiting) {
    next_.reset();
    last_.reset();
    return;
  }
  if (!next_) next_ = now + round_trip_;  // nothing is delivered before
  if (now < *next_) return;
  Reading reading{now, {}};
  double num_bytes = 0;
  for (size_t i = 0; i < sockets_.size(); ++i) {
    const TcpInfo info(sockets_[i]);
    reading.delivered.push_back(info.Word(TcpInfo::kDelivered));
    if (!last_) continue;
    const uint32_t segments = reading.delivered[i] - last_->delivered[i];  // may wrap
    num_bytes += static_cast<double>(segments) * info.Word(TcpInfo::kSegmentBytes);
  }
  const std::optional<Reading> before = std::exchange(last_, std::move(reading));
  next_ = now + kRoundTripsOfReading * round_trip_;
  if (!before) return;
  const double rate = num_bytes / std::chrono::duration<double>(now - before->time).count();
  const bool grows = rate > kGrowth * highest_;
  highest_ = std::max(highest_, rate);
  if (!grows) Limit(kHeadroom * highest_ / static_cast<double>(sockets_.size()));
}

void LongPath::Limit(double bytes_per_s) const {
  const auto rate = static_cast<uint64_t>(bytes_per_s);
  for (const int fd : sockets_) setsockopt(fd, SOL_SOCKET, SO_MAX_PACING_RATE, &rate, sizeof rate);
}

}  // namespace jaxhet::sockets
