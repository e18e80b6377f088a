#ifndef XLA_PLUGIN_ENGINE_COMMON_HANDLES_H_
#define XLA_PLUGIN_ENGINE_COMMON_HANDLES_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <string_view>
#include <utility>

#include "xla_plugin/base/error.h"
#include "xla_plugin/engine/common/exchange.h"

namespace jaxhet {

inline constexpr std::string_view kNotLatest =
    "it is not the handle of the latest jaxhet.start of this name, or its arrays are sharded in "
    "another way than that start has returned them.";

// The rank whose data a finish gives to `rank`.
inline int SourceOf(std::span<const Pair> pairs, int rank) {
  const auto found = std::ranges::find(pairs, rank, &Pair::target);
  return found == pairs.end() ? rank : found->source;
}

// Place of a rank in the group of a start. Throws UsageError if it is in none.
inline size_t PlaceIn(std::span<const int> group, int rank) {
  const auto found = std::ranges::find(group, rank);
  if (found == group.end()) Throw(ErrorCode::kUsage, kNotLatest);
  return static_cast<size_t>(found - group.begin());
}

// The places in plans of the starts that were never finished.
using Unfinished = std::set<std::pair<int64_t, int64_t>>;

// State of an exchange that outlives its program (`jaxhet.start` and `jaxhet.finish`), on one rank.
// All ranks have the same one at the same place of the program.
class HandleState {
 public:
  // Throws UsageError if the start before was not finished.
  void Start(int64_t plan, int64_t index) {
    if (is_started()) {
      Throw(
          ErrorCode::kUsage,
          "the handle of the jaxhet.start before it was never finished. Call jaxhet.finish first, "
          "or give the two starts different names.");
    }
    is_started_ = true;
    plan_ = plan;
    index_ = index;
  }
  // Throws UsageError if the start was finished before.
  void Finish() {
    if (!is_started()) {
      Throw(ErrorCode::kUsage,
            "the handle was finished before. Each jaxhet.start has one jaxhet.finish. If it is "
            "from a "
            "checkpoint, restore that in a new job: there, jaxhet.finish does the whole exchange.");
    }
    is_started_ = false;
  }

  bool is_started() const { return is_started_; }
  // Place of the last start.
  int64_t plan() const { return plan_; }
  int64_t index() const { return index_; }

 private:
  bool is_started_ = false;
  int64_t plan_ = 0;
  int64_t index_ = 0;
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_ENGINE_COMMON_HANDLES_H_
