#ifndef TESTS_SOFTVERBS_LIBRARY_OBJECTS_H_
#define TESTS_SOFTVERBS_LIBRARY_OBJECTS_H_

#include <sys/eventfd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "tests/softverbs/library/control.h"
#include "tests/softverbs/library/verbs_values.h"
#include "xla_plugin/base/fd.h"

// Objects that the program holds; they begin with libibverbs' members. The NIC's mutex guards all
// but the completions of a CQ.
namespace jaxhet::softverbs {

using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;

struct GidRow {
  ibv::Gid gid;
  uint32_t type = 0;
  bool is_there = true;
};

// A NIC with one RoCE port.
struct Device : ibv::Device {
  bool is_up = true;
  std::array<GidRow, 4> gids;

  // The row of the table, or nullptr if it is empty.
  const GidRow* FindGid(uint32_t index) const {
    return index < gids.size() && gids.at(index).is_there ? &gids.at(index) : nullptr;
  }
};

// An object can't be destroyed while others use it.
class Object {
 public:
  explicit Object(std::vector<Object*> used = {}) : used_(std::move(used)) {
    ++num_open;
    for (Object* const object : used_) ++object->num_users_;
  }
  ~Object() {
    --num_open;
    for (Object* const object : used_) --object->num_users_;
  }
  Object(const Object&) = delete;
  Object& operator=(const Object&) = delete;
  bool is_used() const { return num_users_ > 0; }

  static inline int64_t num_open = 0;

 private:
  std::vector<Object*> used_;
  int num_users_ = 0;
};

struct Context : ibv::Context, Object {
  using Object::Object;
};

struct Pd : ibv::Pd, Object {
  using Object::Object;
};

struct Mr : ibv::Mr, Object {
  using Object::Object;

  uint64_t iova = 0;  // origin of remote_addr and Sge::addr
  std::byte* memory = nullptr;
  int access = 0;
  bool is_dmabuf = false;
  bool is_mapped = false;  // `memory` is a mapping of ours
};

// Counts the events of the only CQ that uses it.
struct CompChannel : ibv::CompChannel, Object {
  using Object::Object;

  Fd events{eventfd(0, EFD_SEMAPHORE | EFD_CLOEXEC)};
  struct Cq* cq = nullptr;
};

struct Completion {
  ibv::Wc wc;
  // Once the completion is polled, so many of the QP's requests have left their queue.
  std::shared_ptr<std::atomic<uint64_t>> retired;
  uint64_t retires = 0;
};

struct Cq : ibv::Cq, Object {
  using Object::Object;

  // The completion is lost if the ring is full.
  void Add(Completion completion) {
    const std::lock_guard lock(mutex_);
    is_overrun_ |= std::cmp_greater_equal(ring_.size(), cqe);
    if (is_overrun_) return;
    ring_.push_back(std::move(completion));
    if (std::exchange(is_armed_, false)) {
      eventfd_write(static_cast<CompChannel*>(channel)->events.get(), 1);
    }
  }

  int Poll(std::span<ibv::Wc> wcs) {
    const std::lock_guard lock(mutex_);
    if (is_overrun_ && ring_.empty()) return -1;
    int count = 0;
    for (; std::cmp_less(count, wcs.size()) && !ring_.empty(); ring_.pop_front()) {
      const Completion& completion = ring_.front();
      *completion.retired = completion.retires;
      ibv::Wc& wc = wcs[static_cast<size_t>(count++)] = completion.wc;
      // The opcode of a failed completion is undefined.
      if (wc.status != ibv::kWcSuccess) wc.opcode = ~wc.opcode;
    }
    return count;
  }

  // Earlier completions raise no event.
  void Arm() {
    const std::lock_guard lock(mutex_);
    is_armed_ = true;
  }

  unsigned num_events_unacknowledged = 0;

 private:
  std::mutex mutex_;
  std::deque<Completion> ring_;
  bool is_armed_ = false;
  bool is_overrun_ = false;
};

struct Work {
  ibv::SendWr wr;
  ibv::Sge sge;
  uint64_t index = 0;  // number among all send requests of the QP
  bool has_begun = false;
  std::optional<Fault> error;  // a fault
  bool breaks_peer = false;    // a fault
};

// Requests of one kind, from posting to polling.
struct Queue {
  uint64_t posted = 0;
  std::shared_ptr<std::atomic<uint64_t>> retired = std::make_shared<std::atomic<uint64_t>>(0);

  bool IsFull(uint32_t limit) const { return posted - *retired >= limit; }
};

struct Qp : ibv::Qp, Object {
  using Object::Object;

  int now = 0;  // state; `state` is the last one that the program saw
  ibv::QpCap cap;
  // Attributes that the states INIT, RTR and RTS were given.
  ibv::QpAttr init;
  ibv::QpAttr rtr;
  ibv::QpAttr rts;

  std::deque<Work> sends;
  std::deque<std::pair<uint64_t, uint64_t>> receives;  // wr_id and index
  Queue send_queue;
  Queue receive_queue;

  bool is_waiting = false;  // for a response to the first send, until wake_at
  Time wake_at;             // nothing to do before
  int retries_left = 0;
};

}  // namespace jaxhet::softverbs

#endif  // TESTS_SOFTVERBS_LIBRARY_OBJECTS_H_
