#include "tests/softverbs/library/objects.h"

#include <utility>

namespace jaxhet::softverbs {

bool Cq::Add(const Completion& completion, bool is_solicited) {
  const std::lock_guard lock(mutex_);
  if (overrun_ || std::cmp_greater_equal(ring_.size(), cqe)) {
    overrun_ = true;
    return false;
  }
  ring_.push_back(completion);
  if (armed_ == Armed::kForAll || (armed_ == Armed::kForSolicited && is_solicited)) {
    armed_ = Armed::kNot;
    static_cast<CompChannel*>(channel)->events.Push(this);
  }
  return true;
}

int Cq::Poll(std::span<ibv::Wc> wcs) {
  const std::lock_guard lock(mutex_);
  if (overrun_ && ring_.empty()) return -1;
  int count = 0;
  for (ibv::Wc& wc : wcs) {
    if (ring_.empty()) break;
    const Completion& completion = ring_.front();
    wc = completion.wc;
    const bool is_receive = completion.wc.opcode >= ibv::kWcRecv;
    if (completion.qp != nullptr) {
      (is_receive ? completion.qp->receives_retired : completion.qp->sends_retired) =
          completion.retires;
    }
    // The opcode of a failed completion is undefined.
    if (wc.status != ibv::kWcSuccess) wc.opcode = ~completion.wc.opcode;
    ring_.pop_front();
    ++count;
  }
  return count;
}

// Earlier completions raise no event.
void Cq::Arm(bool only_solicited) {
  const std::lock_guard lock(mutex_);
  if (channel == nullptr) return;
  if (armed_ != Armed::kForAll) armed_ = only_solicited ? Armed::kForSolicited : Armed::kForAll;
}

void Cq::Forget(const Qp& qp) {
  const std::lock_guard lock(mutex_);
  std::erase_if(ring_, [&](const Completion& completion) { return completion.qp == &qp; });
}

void Cq::Orphan(const Qp& qp) {
  const std::lock_guard lock(mutex_);
  for (Completion& completion : ring_) {
    if (completion.qp == &qp) completion.qp = nullptr;
  }
}

}  // namespace jaxhet::softverbs
