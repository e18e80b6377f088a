#include "xla_plugin/engine/host/sibling_starts.h"

#include <algorithm>
#include <ranges>
#include <set>
#include <utility>

namespace jaxhet {
namespace {

constexpr size_t kMostExecutions = 64;  // XLA's CPU client accepts 32 for each device

}  // namespace

bool SiblingStarts::Entry::IsEven() const {
  return std::ranges::all_of(counts | std::views::values,
                             [&](int64_t count) { return count == counts.begin()->second; });
}

void SiblingStarts::Add(const ExchangeRequest& request) {
  Leave(request);
  if (request.siblings.empty()) return;
  auto entry = std::ranges::find_if(uneven_, [&](const Entry& known) {
    return known.IsOf(request) && known.index == request.index;
  });
  if (entry == uneven_.end()) {
    entry = uneven_.insert(entry, {request.run_id, request.plan, request.index, {}});
    for (const int sibling : request.siblings) entry->counts[sibling] = 0;
  }
  ++entry->counts[request.rank];
  if (entry->IsEven()) uneven_.erase(entry);
  ForgetOldest();
}

void SiblingStarts::ForgetOldest() {
  if (uneven_.size() <= kMostExecutions) return;
  std::set<std::pair<int64_t, int64_t>> executions;
  for (const Entry& entry : uneven_) executions.insert({entry.run_id, entry.plan});
  if (executions.size() <= kMostExecutions) return;
  const Entry oldest = uneven_.front();
  std::erase_if(uneven_, [&](const Entry& entry) {
    return entry.run_id == oldest.run_id && entry.plan == oldest.plan;
  });
}

void SiblingStarts::Leave(const ExchangeRequest& request) {
  const auto is_own = [&](const Entry& entry) { return entry.IsOf(request); };
  for (auto entry = uneven_.begin(); entry != uneven_.end() && !is_own(*entry); ++entry) {
    const auto own = entry->counts.find(request.rank);
    if (own == entry->counts.end()) continue;
    const bool is_behind = own->second < std::ranges::max(entry->counts | std::views::values);
    if (is_behind) entry->counts.erase(own);
  }
  std::erase_if(uneven_, [](const Entry& entry) { return entry.IsEven(); });
}

}  // namespace jaxhet
