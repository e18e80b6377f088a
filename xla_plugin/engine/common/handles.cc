#include "xla_plugin/engine/common/handles.h"

#include <algorithm>

#include "xla_plugin/base/error.h"

namespace jaxhet {

int SourceOf(std::span<const Pair> pairs, int rank) {
  const auto found = std::ranges::find(pairs, rank, &Pair::target);
  return found == pairs.end() ? rank : found->source;
}

size_t PlaceIn(std::span<const int> group, int rank) {
  const auto found = std::ranges::find(group, rank);
  if (found == group.end()) Throw(ErrorCode::kUsage, kNotLatest);
  return static_cast<size_t>(found - group.begin());
}

void HandleState::Start(int64_t plan, int64_t index) {
  if (is_started()) {
    Throw(ErrorCode::kUsage,
          "the handle of the jaxhet.start before it was never finished. Call jaxhet.finish first, "
          "or give the two starts different names.");
  }
  is_started_ = true;
  plan_ = plan;
  index_ = index;
}

void HandleState::Finish() {
  if (!is_started()) {
    Throw(
        ErrorCode::kUsage,
        "the handle was finished before. Each jaxhet.start has one jaxhet.finish. If it is from a "
        "checkpoint, restore that in a new job: there, jaxhet.finish does the whole exchange.");
  }
  is_started_ = false;
}

}  // namespace jaxhet
