#ifndef XLA_PLUGIN_NET_SOCKET_LONG_PATH_H_
#define XLA_PLUGIN_NET_SOCKET_LONG_PATH_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace jaxhet::sockets {

// Bytes of a chunk over a long path: the slowest of several sockets holds back few bytes at the end
// of a transfer.
inline constexpr size_t kLongPathChunkBytes = size_t{64} << 10;

// The sockets of one end whose round trip is long, at least 5 ms. They use congestion control by
// rate (BBR, where the kernel has it), which takes no lost packet for congestion, and hold few
// unsent bytes in the kernel, so that a slow socket does not hold what others could send. Send and
// receive buffers are left to the kernel, which grows them.
//
// Several sockets with BBR send more than the path carries, and lose packets. So the rate of all is
// measured while data wait, and once it grows no more, each socket may send its part of a little
// more than the highest rate so far.
class LongPath {
 public:
  using Clock = std::chrono::steady_clock;

  // Sets up a connected TCP socket, if its round trip is long. It must outlive this object.
  bool Add(int fd);
  // Measures. Call it after each attempt to send; `is_waiting`: more is to be sent.
  void Observe(Clock::time_point now, bool is_waiting);

 private:
  void Limit(double bytes_per_s) const;

  struct Reading {
    Clock::time_point time;
    std::vector<uint32_t> delivered;  // segments of each socket
  };

  std::vector<int> sockets_;
  std::chrono::microseconds round_trip_{};  // the longest
  std::optional<Clock::time_point> next_;   // time of a reading; none: no data wait
  std::optional<Reading> last_;
  double highest_ = 0;  // bytes in a second
};

}  // namespace jaxhet::sockets

#endif  // XLA_PLUGIN_NET_SOCKET_LONG_PATH_H_
