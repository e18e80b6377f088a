#ifndef XLA_PLUGIN_NET_VERBS_WIRE_H_
#define XLA_PLUGIN_NET_VERBS_WIRE_H_

#include <array>
#include <cstddef>
#include <cstdint>

// Messages between two verbs connections: offers when they are set up, and immediate data with
// every chunk and credit. Little-endian; kOfferMagic names the version.
namespace jaxhet::verbs {

inline constexpr uint32_t kOfferMagic = 0x3656'584a;  // "JXV6"

// An offer is an OfferInfo, then a NicPairInfo for each NIC pair.
struct OfferInfo {
  uint32_t magic;
  uint32_t num_nic_pairs;
  uint32_t num_slots;    // slots that the peer may fill, one for each of its own
  uint64_t slot_bytes;   // their distance
  uint64_t chunk_bytes;  // most bytes of a chunk in a slot
  uint64_t slots;        // address of the first
  uint64_t headers;      // address of the first slot's header
};

// Our end of a NIC pair; the peer's has the same place in its offer.
struct NicPairInfo {
  std::array<char, 64> nic;
  std::array<uint8_t, 16> gid;
  uint32_t rkey;          // key of the slots' memory
  uint32_t headers_rkey;  // key of the headers' memory
  uint32_t mtu;           // ibv_mtu
  uint16_t lid;
  uint16_t is_infiniband;
  uint32_t qp_num;
  uint32_t psn;
};

enum class ImmediateKind : uint8_t {
  kChunk,   // a slot of the receiver of this has been filled
  kCredit,  // the sender of this has emptied a slot that the receiver had filled
};

// The immediate data of a completion.
struct Immediate {
  ImmediateKind kind;
  uint8_t slot;
  bool operator==(const Immediate&) const = default;
};

inline uint32_t Pack(const Immediate& immediate) {
  return uint32_t{static_cast<uint8_t>(immediate.kind)} << 8 | uint32_t{immediate.slot};
}
inline Immediate UnpackImmediate(uint32_t packed) {
  return {static_cast<ImmediateKind>(packed >> 8 & 0xff), static_cast<uint8_t>(packed & 0xff)};
}

// The header of a chunk, written before the chunk's slot: bytes [offset, offset + num_bytes) of the
// receiver's transfer `ticket` lie in the slot. Where transfers lie in the slots themselves, their
// first bytes are `description` and the slot has the rest.
struct ChunkInfo {
  uint64_t ticket;
  uint64_t offset;
  uint64_t num_bytes;
  std::array<std::byte, 48> description;
};
inline constexpr size_t kHeaderBytes = 128;
static_assert(sizeof(ChunkInfo) <= kHeaderBytes);

}  // namespace jaxhet::verbs

#endif  // XLA_PLUGIN_NET_VERBS_WIRE_H_
