#include "xla_plugin/engine/host/communicator_state.h"

#include <algorithm>

#include "xla_plugin/engine/common/messages.h"

namespace jaxhet {

CommunicatorState::Position CommunicatorState::Enter(int64_t run_id, int64_t plan, int64_t index) {
  if (run_ == 0 || run_id != run_ids_.back()) {
    if (std::ranges::find(run_ids_, run_id) != run_ids_.end()) {
      Throw(ErrorCode::kUsage,
            "two executions of programs overlap on this rank: the earlier one starts this "
            "exchange after the later one has begun. ",
            kLaunchInOrder);
    }
    if (run_ids_.size() == kRememberedRuns) run_ids_.pop_front();
    run_ids_.push_back(run_id);
    ++run_;
    plan_ = plan;
    sequences_.clear();
  }
  if (plan != plan_) Throw(ErrorCode::kUsage, "one execution started exchanges of two plans");
  return {run_, sequences_[index]++};
}

}  // namespace jaxhet
