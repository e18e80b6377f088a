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
  uint32_t qp;  // index in its NIC pair
  bool is_receive;
  Immediate sent;  // a send's
};
uint64_t Pack(const WorkId& id);
WorkId UnpackWorkId(uint64_t packed);

// Memory of ours, and where it goes.
struct Write {
  uint64_t from = 0;
  uint32_t lkey = 0;
  uint32_t num_bytes = 0;
  uint64_t to = 0;
  uint32_t rkey = 0;
};

// Description of a NIC of ours for the peer, and our route to the peer's NIC.
NicPairInfo InfoOf(const NicInfo& nic, uint32_t rkey, uint32_t headers_rkey);
Route RouteOf(const NicInfo& own, const NicPairInfo& peer, const Options& options);

// A queue pair, and the room in its send queue.
class Qp {
 public:
  // A chunk is its header and its bytes; a credit is one request.
  static constexpr uint32_t kSendsPerChunk = 2;

  Qp(Nic& nic, const CompletionQueue& cq, QueuePairSizes sizes, uint16_t pkey_index);

  QpInfo info() const { return {qp_.number(), psn_}; }
  uint32_t room() const { return room_; }

  // Set-up: under this index, the same at both ends.
  void Connect(uint32_t index, Route route, QpInfo peer);
  // All return errno. A header is signalled with the bytes that follow it.
  [[nodiscard]] int PostHeader(const Write& write);
  [[nodiscard]] int Post(const Write& write, Immediate immediate);
  [[nodiscard]] int PostReceive();
  // A post with this immediate has completed.
  void OnSent(Immediate immediate);
  // For good.
  void Kill() { qp_.Kill(); }

 private:
  int PostSend(const Write& write, ibv::SendWr wr);

  const std::string& nic_name_;
  const uint32_t num_receives_;
  uint32_t index_ = 0;
  const uint32_t psn_;
  QueuePair qp_;
  uint32_t room_;
};

}  // namespace jaxhet::verbs

#endif  // XLA_PLUGIN_NET_VERBS_QP_H_
