#ifndef XLA_PLUGIN_BASE_RANGE_SET_H_
#define XLA_PLUGIN_BASE_RANGE_SET_H_

#include <cstddef>
#include <iterator>
#include <map>

#include "xla_plugin/base/checked.h"

namespace jaxhet {

// Ranges [begin, end) that do not overlap. Neighbours become one, so that bytes which arrive in
// order take one entry.
class RangeSet {
 public:
  bool empty() const { return ranges_.empty(); }

  // Adds [begin, begin + num_bytes). False, and nothing is added, if the range is empty, overlaps
  // another one or does not lie in [0, total).
  bool Add(size_t begin, size_t num_bytes, size_t total) {
    if (num_bytes == 0 || !InBounds(begin, num_bytes, total)) return false;
    const size_t end = begin + num_bytes;
    auto next = ranges_.lower_bound(end);
    if (next != ranges_.begin() && std::prev(next)->second > begin) return false;
    size_t joined_end = end;
    if (next != ranges_.end() && next->first == end) {
      joined_end = next->second;
      next = ranges_.erase(next);
    }
    if (next != ranges_.begin() && std::prev(next)->second == begin) {
      std::prev(next)->second = joined_end;
    } else {
      ranges_.emplace_hint(next, begin, joined_end);
    }
    return true;
  }

  // Takes [begin, begin + num_bytes) out again, which must be a part of what was added.
  void Remove(size_t begin, size_t num_bytes) {
    const auto holder = std::prev(ranges_.upper_bound(begin));
    const auto [holder_begin, holder_end] = *holder;
    ranges_.erase(holder);
    if (holder_begin < begin) ranges_[holder_begin] = begin;
    if (begin + num_bytes < holder_end) ranges_[begin + num_bytes] = holder_end;
  }

 private:
  std::map<size_t, size_t> ranges_;  // from begin to end
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_BASE_RANGE_SET_H_
