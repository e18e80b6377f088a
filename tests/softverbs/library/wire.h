#ifndef TESTS_SOFTVERBS_LIBRARY_WIRE_H_
#define TESTS_SOFTVERBS_LIBRARY_WIRE_H_

#include <poll.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "tests/softverbs/library/packet.h"
#include "xla_plugin/base/fd.h"

namespace jaxhet::softverbs {

// Packets between the processes of a machine, over Unix sockets with abstract names: nothing is
// left behind. Processes of one fabric (SOFTVERBS_FABRIC) and one network namespace reach each
// other.
class Wire {
 public:
  explicit Wire(std::string fabric) : fabric_(std::move(fabric)) {}

  // Takes a number that no other process of the fabric has.
  void Open();
  void Close();
  uint32_t process() const { return process_; }

  // False if the process does not exist.
  bool Send(uint32_t process, const Packet& packet);
  // All packets that have arrived; `lost` gets the processes that are gone.
  std::vector<Packet> Receive(const std::function<void(uint32_t)>& lost);
  void AppendFds(std::vector<pollfd>& fds) const;
  std::vector<uint32_t> OtherProcesses() const;

  static constexpr uint32_t kMaxProcesses = 1 << 12;

 private:
  struct Link {
    Fd fd;
    std::deque<Packet> queue;
  };

  std::string NameOf(uint32_t process) const;
  // False if the peer is gone.
  static bool Flush(Link& link);
  // False at the end.
  static bool Read(const Fd& fd, std::vector<Packet>& packets);

  std::string fabric_;
  uint32_t process_ = 0;
  Fd listener_;
  std::vector<Fd> incoming_;
  std::map<uint32_t, Link> outgoing_;
};

}  // namespace jaxhet::softverbs

#endif  // TESTS_SOFTVERBS_LIBRARY_WIRE_H_
