#ifndef XLA_PLUGIN_TRANSPORT_VERBS_QP_PAIR_H_
#define XLA_PLUGIN_TRANSPORT_VERBS_QP_PAIR_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>

#include "xla_plugin/transport/verbs/device.h"
#include "xla_plugin/transport/verbs/nics.h"
#include "xla_plugin/transport/verbs/wire.h"

namespace jaxhet::verbs {

// Identity of a work request, in its wr_id.
struct WorkId {
  uint32_t qp;
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

// One queue pair of ours and the peer's that it is connected with. When it fails, both ends close
// it: kLive -> Close() -> kClosing -> the peer has closed, too: Finish() -> kDead.
class QpPair {
 public:
  enum class State { kSetUp, kLive, kClosing, kDead };

  QpPair(Nic& nic, const CompletionQueue& cq, QueuePairSizes sizes, uint16_t pkey_index);

  QpInfo info() const { return {qp_->number(), psn_}; }
  uint32_t index() const { return index_; }
  State state() const { return state_; }
  bool is_live() const { return state_ == State::kLive; }
  bool is_closed() const { return state_ == State::kClosing || state_ == State::kDead; }
  size_t bytes_in_flight() const { return bytes_in_flight_; }

  // Set-up: under this index, the same at both ends.
  void Connect(uint32_t index, Route route, QpInfo peer);
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
  void Close();
  bool peer_has_closed = false;
  // Both ends have closed.
  void Finish();

 private:
  // A signalled write, and what was posted without a signal before it.
  struct Posted {
    int slot;
    uint32_t num_sends;
    uint32_t num_bytes;
  };

  int Post(const Write& write, std::optional<Immediate> immediate, bool is_signalled);

  const std::string& nic_name_;
  const uint32_t num_receives_;
  uint32_t index_ = 0;
  State state_ = State::kSetUp;
  const uint32_t psn_;
  std::unique_ptr<QueuePair> qp_;  // null once it is dead

  uint32_t room_;
  Posted unsignalled_{};
  std::deque<Posted> posted_;
  size_t bytes_in_flight_ = 0;
};

}  // namespace jaxhet::verbs

#endif  // XLA_PLUGIN_TRANSPORT_VERBS_QP_PAIR_H_
