#ifndef XLA_PLUGIN_ENGINE_PLANS_H_
#define XLA_PLUGIN_ENGINE_PLANS_H_

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

namespace jaxhet {

// The plans of one process by fingerprint. A plan's text has one line per exchange, what is
// compared before a TAB and a description for people after it.
class Plans {
 public:
  void Add(int64_t plan, std::string_view text) { texts_.insert_or_assign(plan, text); }
  // Null if it was never added.
  const std::string* Find(int64_t plan) const;
  // "exchange 3 (<description>)", as far as it is known.
  std::string Describe(int64_t plan, int64_t index) const;

 private:
  std::map<int64_t, std::string> texts_;
};

struct PlanDifference {
  int64_t line;  // from 0
  std::string ours;
  std::string theirs;
};

// The first line in which two plans differ before the TAB; "(no more exchanges)" stands for a line
// that one does not have. Texts that do not differ give their end.
PlanDifference FirstDifference(std::string_view ours, std::string_view theirs);

}  // namespace jaxhet

#endif  // XLA_PLUGIN_ENGINE_PLANS_H_
