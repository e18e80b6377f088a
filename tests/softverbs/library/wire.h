#ifndef TESTS_SOFTVERBS_LIBRARY_WIRE_H_
#define TESTS_SOFTVERBS_LIBRARY_WIRE_H_

#include <poll.h>

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tests/softverbs/library/verbs_values.h"
#include "xla_plugin/base/fd.h"

namespace jaxhet::softverbs {

// A QP's number is its process's number and its own in that process.
inline constexpr uint32_t kQpsOfProcess = 1 << 12;

// Status of a response, besides the statuses of a WC.
inline constexpr int kDropped = -1;      // the request counts as lost
inline constexpr int kNotReadyYet = -2;  // RNR

struct MessageInfo {
  uint32_t is_response = 0;
  uint32_t to_qpn = 0;
  uint32_t from_qpn = 0;
  uint32_t num_bytes = 0;  // bytes behind this structure
  int32_t status = 0;      // only responses have one; the members below are a request's
  uint32_t psn = 0;
  ibv::Gid from;
  ibv::Gid to;
  uint32_t gid_type = 0;
  int32_t opcode = 0;
  int32_t mtu = 0;
  uint32_t is_whole = 0;   // no fault cuts it
  uint32_t breaks_qp = 0;  // a fault
  uint32_t imm_data = 0;
  uint32_t rkey = 0;
  uint32_t length = 0;
  uint64_t remote_addr = 0;
};

struct Message {
  MessageInfo info;
  std::vector<std::byte> bytes;
};

// Messages between the processes of a machine, over Unix sockets with abstract names: nothing is
// left behind. Processes of one network namespace reach each other.
class Wire {
 public:
  // Takes a number that no other process has.
  void Open();
  void Close();
  uint32_t process() const { return process_; }

  // Sends to the process of a QP. False if it does not exist.
  bool Send(Message message);
  // All messages that have arrived. Sends what had no room before.
  std::vector<Message> Receive();
  void AppendFds(std::vector<pollfd>& fds) const;

 private:
  // Bytes that wait to be sent, or are the beginning of a message.
  struct Link {
    Fd fd;
    std::vector<std::byte> bytes;
  };

  static std::string NameOf(uint32_t process);
  // False if the peer is gone.
  static bool Flush(Link& link);
  static bool Read(Link& link, std::vector<Message>& messages);

  uint32_t process_ = 0;
  Fd listener_;
  std::list<Link> incoming_;
  std::map<uint32_t, Link> outgoing_;
};

}  // namespace jaxhet::softverbs

#endif  // TESTS_SOFTVERBS_LIBRARY_WIRE_H_
