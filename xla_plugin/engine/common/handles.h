#ifndef XLA_PLUGIN_ENGINE_COMMON_HANDLES_H_
#define XLA_PLUGIN_ENGINE_COMMON_HANDLES_H_

#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <string_view>
#include <utility>

#include "xla_plugin/engine/common/exchange.h"

namespace jaxhet {

inline constexpr std::string_view kNotLatest =
    "it is not the handle of the latest jaxhet.start of this name, or its arrays are sharded in "
    "another way than that start has returned them.";

// The rank whose data a finish gives to `rank`.
int SourceOf(std::span<const Pair> pairs, int rank);
// Place of a rank in the group of a start. Throws UsageError if it is in none.
size_t PlaceIn(std::span<const int> group, int rank);

// The places in plans of the starts that were never finished.
using Unfinished = std::set<std::pair<int64_t, int64_t>>;

// State of an exchange that outlives its program (`jaxhet.start` and `jaxhet.finish`), on one rank.
// All ranks have the same one at the same place of the program.
class HandleState {
 public:
  // Throws UsageError if the start before was not finished.
  void Start(int64_t plan, int64_t index);
  // Throws UsageError if the start was finished before.
  void Finish();

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
