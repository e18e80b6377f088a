#ifndef TESTS_SOFTVERBS_LIBRARY_OBJECTS_H_
#define TESTS_SOFTVERBS_LIBRARY_OBJECTS_H_

#include <sys/eventfd.h>
#include <sys/poll.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "tests/softverbs/library/fabric.h"
#include "tests/softverbs/library/verbs_values.h"
#include "xla_plugin/base/fd.h"

// Objects that the program holds; they begin with libibverbs' members. The NIC's mutex guards all
// but a CQ's ring and the queues of events, which have their own.
namespace jaxhet::softverbs {

using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;

// Events with a file descriptor that is readable as long as there are any.
template <typename Event>
class EventQueue {
 public:
  int fd() const { return fd_.get(); }

  void Push(const Event& event) {
    const std::lock_guard lock(mutex_);
    events_.push_back(event);
    eventfd_write(fd_.get(), 1);
  }

  // Waits unless the program made the descriptor non-blocking; errno if there is nothing.
  bool Pop(Event& event) {
    while (true) {
      eventfd_t one = 0;
      if (eventfd_read(fd_.get(), &one) != 0) return false;
      const std::lock_guard lock(mutex_);
      if (events_.empty()) continue;  // Erase() ran in between
      event = events_.front();
      events_.pop_front();
      return true;
    }
  }

  template <typename Predicate>
  size_t Erase(Predicate predicate) {
    const std::lock_guard lock(mutex_);
    const size_t count = std::erase_if(events_, predicate);
    for (size_t i = 0; i < count; ++i) {
      pollfd ready{.fd = fd_.get(), .events = POLLIN, .revents = 0};
      eventfd_t one = 0;
      if (poll(&ready, 1, 0) == 1) eventfd_read(fd_.get(), &one);
    }
    return count;
  }

 private:
  Fd fd_{eventfd(0, EFD_SEMAPHORE | EFD_CLOEXEC)};
  std::mutex mutex_;
  std::deque<Event> events_;
};

struct Context : ibv::Context {
  DeviceModel* model = nullptr;
  int num_objects = 0;  // PDs, CQs and channels
};

struct Pd : ibv::Pd {
  int num_objects = 0;  // MRs and QPs
};

struct Mr : ibv::Mr {
  uint64_t iova = 0;  // origin of remote_addr and Sge::addr
  std::byte* memory = nullptr;
  int access = 0;
  bool is_dmabuf = false;
  bool is_mapped = false;  // `memory` is a mapping of ours
};

struct CompChannel : ibv::CompChannel {
  EventQueue<struct Cq*> events;
};

struct Completion {
  ibv::Wc wc;
  struct Qp* qp = nullptr;
  uint64_t retires = 0;  // once it is polled, this many of the QP's requests have left their queue
};

struct Cq : ibv::Cq {
  // False if the ring is full: the completion is lost.
  bool Add(const Completion& completion, bool is_solicited);
  int Poll(std::span<ibv::Wc> wcs);
  void Arm(bool only_solicited);
  // Forgets the completions of `qp`, which is reset.
  void Forget(const Qp& qp);
  // `qp` goes; its completions stay, as with soft-RoCE.
  void Orphan(const Qp& qp);

  int num_qps = 0;
  bool overrun_is_told = false;
  std::atomic<unsigned> events_given = 0;
  std::atomic<unsigned> events_acked = 0;

 private:
  enum class Armed : uint8_t { kNot, kForSolicited, kForAll };
  std::mutex mutex_;
  std::deque<Completion> ring_;
  Armed armed_ = Armed::kNot;
  bool overrun_ = false;
};

// A send request. Bytes of an inline one are copied when it is posted.
struct Work {
  uint64_t wr_id = 0;
  uint64_t index = 0;  // number among all send requests of the QP
  int opcode = 0;
  unsigned flags = 0;
  uint32_t imm_data = 0;
  uint64_t remote_addr = 0;
  uint32_t rkey = 0;
  uint64_t length = 0;
  std::vector<ibv::Sge> sges;
  std::vector<std::byte> inline_bytes;

  bool has_begun = false;
  // A fault: fails with this status once fail_at bytes, or the whole request, were executed.
  std::optional<int> fails_with;
  uint64_t fail_at = 0;
  bool breaks_peer = false;  // a fault
};

struct ReceiveWork {
  uint64_t wr_id = 0;
  uint64_t index = 0;
  std::vector<ibv::Sge> sges;
};

struct Qp : ibv::Qp {
  int now = ibv::kQpStateReset;  // `state` is the last state that the program saw
  ibv::QpAttr attr;
  ibv::QpInitAttr init;

  std::deque<Work> sends;
  std::deque<ReceiveWork> receives;
  uint64_t sends_posted = 0;
  uint64_t receives_posted = 0;
  std::atomic<uint64_t> sends_retired = 0;
  std::atomic<uint64_t> receives_retired = 0;

  // The requester's half: at most one packet is under way.
  uint64_t offset = 0;  // bytes of sends.front() that were acknowledged
  uint32_t send_psn = 0;
  bool is_waiting = false;  // for a response, until wake_at
  Time wake_at;             // nothing to do before
  int retries_left = 0;
  int rnr_retries_left = 0;

  // The responder's half.
  uint32_t receive_psn = 0;
};

}  // namespace jaxhet::softverbs

#endif  // TESTS_SOFTVERBS_LIBRARY_OBJECTS_H_
