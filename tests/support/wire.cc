// A line between two network namespaces with a rate, a delay and random losses:
//
//     wire NAME DELAY_MS LOSS MBIT_S SEED PID ADDRESS PID ADDRESS
//
// The network namespace of each process PID gets a TAP interface NAME with its ADDRESS, both in one
// /24 network, and its loopback interface is switched on. Each direction has a queue before a
// transmitter of MBIT_S (0: no limit). A packet is lost at random (the fraction LOSS), or if it
// would wait in the queue longer than a round trip and kLeastQueue. The program prints "ready", and
// at the end of its input the traffic of each direction. It serves kernels without netem.
//
// The kernel hands over a TCP segment of up to 64 kB as one frame (TSO). The line counts it as the
// packets that it stands for: each has headers and a gap, and is lost alone. The frame arrives with
// its last packet.

#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <random>
#include <string>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;

// Copy of virtio_net_hdr: linux/virtio_net.h is not C++.
struct Header {
  uint8_t flags;
  uint8_t gso_type;  // 0: one packet
  uint16_t hdr_len;
  uint16_t gso_size;
  uint16_t csum_start;
  uint16_t csum_offset;
};

constexpr Clock::duration kLeastQueue = std::chrono::milliseconds(10);
constexpr size_t kMostFrameBytes = sizeof(Header) + 14 + (1 << 16);
constexpr int kKernelQueue = 10000;  // frames until this program reads them
constexpr size_t kGapBytes = 24;     // preamble, checksum and gap of an Ethernet frame
constexpr size_t kEthernetBytes = 14;

[[noreturn]] void Fail(const char* call) {
  std::perror(call);
  std::exit(1);
}

// Switches an interface on. Gives it an address, if that is not null.
void TakeUp(const char* name, const char* address) {
  const int any = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  ifreq request{};
  std::strncpy(request.ifr_name, name, IFNAMSIZ - 1);
  const auto set = [&](unsigned long what, const char* text) {
    sockaddr_in value{.sin_family = AF_INET, .sin_port = 0, .sin_addr = {}, .sin_zero = {}};
    if (inet_pton(AF_INET, text, &value.sin_addr) != 1) Fail(text);
    std::memcpy(&request.ifr_addr, &value, sizeof value);
    if (ioctl(any, what, &request) != 0) Fail("setting an address");
  };
  if (address != nullptr) {
    set(SIOCSIFADDR, address);
    set(SIOCSIFNETMASK, "255.255.255.0");
    request.ifr_qlen = kKernelQueue;
    if (ioctl(any, SIOCSIFTXQLEN, &request) != 0) Fail("SIOCSIFTXQLEN");
  }
  request.ifr_flags = IFF_UP;
  if (ioctl(any, SIOCSIFFLAGS, &request) != 0) Fail("SIOCSIFFLAGS");
  close(any);
}

// A descriptor of a new interface in the network namespace of a process.
int OpenTap(const char* name, const std::string& pid, const char* address) {
  const int space = open(("/proc/" + pid + "/ns/net").c_str(), O_RDONLY | O_CLOEXEC);
  if (space < 0 || setns(space, CLONE_NEWNET) != 0) Fail("setns");
  close(space);
  const int tap = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  if (tap < 0) Fail("/dev/net/tun");
  ifreq request{};
  std::strncpy(request.ifr_name, name, IFNAMSIZ - 1);
  request.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR;
  if (ioctl(tap, TUNSETIFF, &request) != 0) Fail("TUNSETIFF");
  if (ioctl(tap, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4) != 0) Fail("TUNSETOFFLOAD");
  TakeUp(name, address);
  TakeUp("lo", nullptr);
  return tap;
}

// A TCP segment over IPv4 in an Ethernet frame behind its Header.
class Segment {
 public:
  explicit Segment(std::vector<uint8_t> frame) : frame_(std::move(frame)) {
    std::memcpy(&header_, frame_.data(), sizeof header_);
    tcp_ = kIp + size_t{4} * (frame_[kIp] & 0x0f);
    payload_ = tcp_ + size_t{4} * (frame_[tcp_ + 12] >> 4);
  }

  size_t header_bytes() const { return payload_ - sizeof header_; }
  size_t payload_bytes() const { return frame_.size() - payload_; }
  size_t packet_bytes() const { return header_.gso_size; }

  // Frame with the packets [begin, end) of the segment.
  std::vector<uint8_t> Cut(size_t begin, size_t end) const {
    const size_t first = begin * packet_bytes();
    const size_t last = std::min(end * packet_bytes(), payload_bytes());
    if (first == 0 && last == payload_bytes()) return frame_;
    const auto payload = frame_.begin() + static_cast<ptrdiff_t>(payload_);
    std::vector<uint8_t> cut(frame_.begin(), payload);
    cut.insert(cut.end(), payload + static_cast<ptrdiff_t>(first),
               payload + static_cast<ptrdiff_t>(last));
    Add16(cut, kIp + 2, cut.size() - kIp - Get16(cut, kIp + 2));  // length
    Add16(cut, kIp + 4, begin);                                   // identification
    uint32_t sequence = 0;
    std::memcpy(&sequence, &cut[tcp_ + 4], sizeof sequence);
    sequence = htonl(ntohl(sequence) + static_cast<uint32_t>(first));
    std::memcpy(&cut[tcp_ + 4], &sequence, sizeof sequence);
    if (last < payload_bytes()) cut[tcp_ + 13] &= static_cast<uint8_t>(~0x09);  // FIN and PSH
    if (end - begin == 1) {
      Header plain = header_;
      plain.gso_type = 0;
      plain.gso_size = 0;
      std::memcpy(cut.data(), &plain, sizeof plain);
    }
    SetIpChecksum(cut);  // TCP needs none on one machine
    return cut;
  }

 private:
  static constexpr size_t kIp = sizeof(Header) + kEthernetBytes;

  static uint16_t Get16(const std::vector<uint8_t>& frame, size_t at) {
    return static_cast<uint16_t>(frame[at] << 8 | frame[at + 1]);
  }
  static void Add16(std::vector<uint8_t>& frame, size_t at, size_t value) {
    const size_t sum = Get16(frame, at) + value;
    frame[at] = static_cast<uint8_t>(sum >> 8);
    frame[at + 1] = static_cast<uint8_t>(sum);
  }
  void SetIpChecksum(std::vector<uint8_t>& frame) const {
    frame[kIp + 10] = frame[kIp + 11] = 0;
    uint32_t sum = 0;
    for (size_t i = kIp; i < tcp_; i += 2) sum += Get16(frame, i);
    while (sum >> 16) sum = (sum & 0xffff) + (sum >> 16);
    Add16(frame, kIp + 10, ~sum & 0xffff);
  }

  std::vector<uint8_t> frame_;
  Header header_{};
  size_t tcp_;
  size_t payload_;
};

struct Line {
  Clock::duration delay;
  Clock::duration longest_queue;
  double loss;
  double nanoseconds_of_byte;
};

class Direction {
 public:
  Direction(const Line& line, int from, int to, uint32_t seed)
      : line_(line), from_(from), to_(to), random_(seed) {}

  // Reads all frames that the sender's kernel has.
  void Take() {
    std::vector<uint8_t> room(kMostFrameBytes);
    for (int i = 0; i < 64; ++i) {
      const ssize_t count = read(from_, room.data(), room.size());
      if (count <= 0) return;
      Add({room.begin(), room.begin() + count});
    }
  }

  // Delivers the frames that are due. Returns the time of the next one.
  Time Deliver(Time now) {
    for (; !on_the_way_.empty() && on_the_way_.front().due <= now; on_the_way_.pop_front()) {
      const std::vector<uint8_t>& frame = on_the_way_.front().bytes;
      if (write(to_, frame.data(), frame.size()) < 0) ++failed_;  // the interface is down
    }
    return on_the_way_.empty() ? Time::max() : on_the_way_.front().due;
  }

  void Print(const char* name) const {
    std::printf("%s: %zu packets, %zu lost, %zu more than the queue holds, %zu not delivered\n",
                name, packets_, lost_, dropped_, failed_);
  }

 private:
  struct Frame {
    Time due;
    std::vector<uint8_t> bytes;
  };

  void Add(std::vector<uint8_t> frame) {
    Header header;
    std::memcpy(&header, frame.data(), sizeof header);
    if (header.gso_type == 0) {
      if (Passes(frame.size() - sizeof header)) Send(std::move(frame));
      return;
    }
    const Segment segment(std::move(frame));
    size_t begin = 0;
    size_t packet = 0;
    for (size_t sent = 0; sent < segment.payload_bytes(); ++packet) {
      const size_t bytes = std::min(segment.packet_bytes(), segment.payload_bytes() - sent);
      sent += bytes;
      if (Passes(segment.header_bytes() + bytes)) continue;
      if (begin < packet) Send(segment.Cut(begin, packet));
      begin = packet + 1;
    }
    if (begin < packet) Send(segment.Cut(begin, packet));
  }

  // Whether a packet reaches the end of the line.
  bool Passes(size_t num_bytes) {
    ++packets_;
    const Time now = Clock::now();
    free_at_ = std::max(free_at_, now);
    if (free_at_ - now > line_.longest_queue) {
      ++dropped_;
      return false;
    }
    free_at_ += std::chrono::nanoseconds(static_cast<int64_t>(
        static_cast<double>(num_bytes + kGapBytes) * line_.nanoseconds_of_byte));
    if (std::uniform_real_distribution<>()(random_) >= line_.loss) return true;
    ++lost_;
    return false;
  }

  void Send(std::vector<uint8_t> frame) {
    on_the_way_.push_back({free_at_ + line_.delay, std::move(frame)});
  }

  const Line& line_;
  int from_;
  int to_;
  std::mt19937 random_;
  Time free_at_{};  // when the transmitter has sent what it has
  std::deque<Frame> on_the_way_;
  size_t packets_ = 0;
  size_t lost_ = 0;
  size_t dropped_ = 0;
  size_t failed_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 10) return 2;
  const auto delay = std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double, std::milli>(std::atof(argv[2])));
  const double mbit_s = std::atof(argv[4]);
  const Line line{.delay = delay,
                  .longest_queue = std::max(2 * delay, kLeastQueue),
                  .loss = std::atof(argv[3]),
                  .nanoseconds_of_byte = mbit_s > 0 ? 8000 / mbit_s : 0};
  const auto seed = static_cast<uint32_t>(std::atoi(argv[5]));
  const std::array taps = {OpenTap(argv[1], argv[6], argv[7]), OpenTap(argv[1], argv[8], argv[9])};
  std::array directions = {Direction(line, taps[0], taps[1], seed),
                           Direction(line, taps[1], taps[0], seed + 1)};
  prctl(PR_SET_TIMERSLACK, 1UL);
  std::puts("ready");
  std::fflush(stdout);
  std::array<pollfd, 3> files = {
      {{STDIN_FILENO, POLLIN, 0}, {taps[0], POLLIN, 0}, {taps[1], POLLIN, 0}}};
  while (true) {
    const Time now = Clock::now();
    Time next = now + std::chrono::seconds(1);
    for (Direction& direction : directions) next = std::min(next, direction.Deliver(now));
    const auto wait = std::max<int64_t>((next - Clock::now()).count(), 0);
    const timespec limit = {wait / 1'000'000'000, wait % 1'000'000'000};
    if (ppoll(files.data(), files.size(), &limit, nullptr) < 0) Fail("ppoll");
    if (files[0].revents != 0) break;
    for (size_t i = 0; i < directions.size(); ++i) {
      if (files[i + 1].revents != 0) directions[i].Take();
    }
  }
  directions[0].Print("there");
  directions[1].Print("back");
}
