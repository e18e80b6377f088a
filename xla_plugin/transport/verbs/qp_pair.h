#ifndef XLA_PLUGIN_TRANSPORT_VERBS_QP_PAIR_H_
#define XLA_PLUGIN_TRANSPORT_VERBS_QP_PAIR_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>

#include "xla_plugin/transport/verbs/device.h"
#include "xla_plugin/transport/verbs/nics.h"
#include "xla_plugin/transport/verbs/wire.h"

namespace jaxhet::verbs {

// Identity of a work request, in its wr_id.
struct WorkId {
  uint32_t qp;
  uint16_t epoch;
  bool is_receive;
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
NicPairInfo InfoOf(const NicInfo& nic, uint32_t rkey);
Route RouteOf(const NicInfo& own, const NicPairInfo& peer, const Options& options);

inline constexpr int kNoSlot = -1;
// A queue pair is replaced so many times.
inline constexpr uint16_t kMaxEpoch = 3;

// One queue pair of ours and the peer's that it is connected with. When it fails, both ends close
// it, and may connect a replacement under the next epoch:
//   kLive -> Close() -> kClosing -> both ends have closed: Reopen() -> kOpening -> the peer has
//   reopened, too: SetLive() -> kLive; kDead where an end has no replacement.
class QpPair {
 public:
  enum class State { kSetUp, kLive, kClosing, kOpening, kDead };

  QpPair(Nic& nic, const CompletionQueue& cq, QueuePairSizes sizes, uint16_t pkey_index);

  QpInfo info() const { return {qp_->number(), psn_}; }
  uint32_t index() const { return index_; }
  State state() const { return state_; }
  bool is_live() const { return state_ == State::kLive; }
  bool is_closed() const { return state_ == State::kClosing || state_ == State::kDead; }
  uint16_t epoch() const { return epoch_; }
  size_t bytes_in_flight() const { return bytes_in_flight_; }

  // Set-up: under this index, the same at both ends.
  void Connect(uint32_t index, const Route& route, QpInfo peer);
  void SetLive() { state_ = State::kLive; }

  bool HasRoom(uint32_t num_sends) const { return is_live() && room_ >= num_sends; }
  // Both return errno. Fragments are signalled with the last one only.
  [[nodiscard]] int PostFragment(const Write& write);
  [[nodiscard]] int PostLast(const Write& write, Immediate immediate, int slot);

  // The slot of the oldest signalled write, or kNoSlot, which has completed.
  int OnSent();
  // A receive has completed. Returns errno.
  [[nodiscard]] int Restock();

  // For good.
  void Kill();
  // The queue pair of the next epoch; its qp_num is 0 without one.
  QpInfo Close();
  // Message of the peer's closing; kept until our own closing.
  std::optional<QpInfo> peer_closed;
  // Both ends have closed. False if there is no replacement on both sides: the queue pair is dead.
  bool Reopen();

 private:
  // A signalled write, and what was posted without a signal before it.
  struct Posted {
    int slot;
    uint32_t num_sends;
    uint32_t num_bytes;
  };

  std::unique_ptr<QueuePair> MakeQueuePair() const;
  void ConnectQueuePair(QpInfo peer);
  int Post(const Write& write, std::optional<Immediate> immediate, bool is_signalled);

  Nic& nic_;
  const CompletionQueue& cq_;
  QueuePairSizes sizes_;
  uint16_t pkey_index_;
  uint32_t index_ = 0;
  Route route_;
  State state_ = State::kSetUp;
  uint16_t epoch_ = 0;
  uint32_t psn_;
  std::unique_ptr<QueuePair> qp_;
  std::unique_ptr<QueuePair> replacement_;

  uint32_t room_;
  Posted unsignalled_{};
  std::deque<Posted> posted_;
  size_t bytes_in_flight_ = 0;
};

}  // namespace jaxhet::verbs

#endif  // XLA_PLUGIN_TRANSPORT_VERBS_QP_PAIR_H_
