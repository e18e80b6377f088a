#ifndef TESTS_SOFTVERBS_LIBRARY_PACKET_H_
#define TESTS_SOFTVERBS_LIBRARY_PACKET_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tests/softverbs/library/fabric.h"

namespace jaxhet::softverbs {

// A request is cut into packets of at most this many bytes, and each is acknowledged before the
// next one of its QP leaves.
inline constexpr uint64_t kPacketBytes = 64 << 10;

// A QP's number is its process's number and its own in that process.
inline constexpr uint32_t kQpsOfProcess = 1 << 12;

enum class PacketKind : uint32_t { kRequest, kResponse, kCommand };

// Status of a response, besides the statuses of a WC.
inline constexpr int kDropped = -1;      // the packet counts as lost
inline constexpr int kNotReadyYet = -2;  // RNR

struct PacketInfo {
  PacketKind kind = PacketKind::kRequest;
  uint32_t to_qpn = 0;
  uint32_t from_qpn = 0;
  uint32_t psn = 0;
  Route route;
  // Fields of a request.
  int32_t opcode = 0;
  int32_t mtu = 0;
  uint32_t is_last = 0;
  uint32_t is_solicited = 0;
  uint32_t breaks_qp = 0;  // a fault
  uint32_t imm_data = 0;
  uint32_t rkey = 0;
  uint32_t length = 0;       // bytes of this packet, which a read does not carry
  uint64_t remote_addr = 0;  // address of the whole request
  uint64_t total_length = 0;
  uint64_t offset = 0;  // offset of this packet in the request
  // Fields of a response.
  int32_t status = 0;
  uint32_t rnr_timer = 0;
};

struct Packet {
  PacketInfo info;
  std::vector<std::byte> bytes;
};

}  // namespace jaxhet::softverbs

#endif  // TESTS_SOFTVERBS_LIBRARY_PACKET_H_
