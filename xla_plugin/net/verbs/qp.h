#ifndef XLA_PLUGIN_NET_VERBS_QP_H_
#define XLA_PLUGIN_NET_VERBS_QP_H_

#include <cstddef>
#include <cstdint>

#include "xla_plugin/net/verbs/device.h"
#include "xla_plugin/net/verbs/nics.h"
#include "xla_plugin/net/verbs/wire.h"

namespace jaxhet::verbs {

// Identity of a signalled work request, in its wr_id.
struct WorkId {
  bool is_receive;
  Immediate sent;  // a receive has only the kind of its queue pair
};
uint64_t Pack(const WorkId& id);
WorkId UnpackWorkId(uint64_t packed);

// Memory of ours, and the peer's memory that it is written to.
struct Write {
  uint64_t from = 0;
  uint32_t lkey = 0;
  uint32_t num_bytes = 0;
  uint64_t to = 0;
  uint32_t rkey = 0;
};

// Description of a NIC of ours for the peer, but for keys and queue pairs; and our route to the
// peer's NIC.
NicPairInfo InfoOf(const NicInfo& nic);
Route RouteOf(const NicInfo& own, const NicPairInfo& peer, const Options& options);

// A queue pair for immediates of one kind, and the room in its send queue.
class Qp {
 public:
  // A chunk is its header and its bytes; a credit is one request.
  static constexpr uint32_t kSendsPerChunk = 2;

  // With room for `num_sends` chunks or credits.
  Qp(Nic& nic, const CompletionQueue& cq, ImmediateKind kind, uint32_t num_sends,
     uint32_t num_receives, uint16_t pkey_index);

  QpInfo info() const { return {qp_.number(), psn_}; }
  uint32_t room() const { return room_; }

  // Set-up.
  void Connect(Route route, QpInfo peer);
  // All return errno. A header is signalled with the bytes that follow it.
  [[nodiscard]] int PostHeader(const Write& write);
  [[nodiscard]] int Post(const Write& write, uint8_t slot);
  [[nodiscard]] int PostReceive();
  // A chunk or credit was sent.
  void OnSent() { ++room_; }
  // Ends the queue pair.
  void Kill() { qp_.Kill(); }

 private:
  int PostSend(const Write& write, ibv::SendWr wr);

  const std::string& nic_name_;
  const ImmediateKind kind_;
  const uint32_t num_receives_;
  const uint32_t psn_;
  QueuePair qp_;
  uint32_t room_;
};

}  // namespace jaxhet::verbs

#endif  // XLA_PLUGIN_NET_VERBS_QP_H_
