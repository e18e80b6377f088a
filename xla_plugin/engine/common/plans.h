#ifndef XLA_PLUGIN_ENGINE_COMMON_PLANS_H_
#define XLA_PLUGIN_ENGINE_COMMON_PLANS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>

namespace jaxhet {

// Two texts about one program. In each line, what is compared stands before a TAB and a description
// for people after it.
struct Plan {
  std::string text;     // one line per exchange
  std::string program;  // name and digest, then one line per equation; empty if unknown
  int64_t num_exchanges;

  // The first word of `program`.
  std::string_view program_name() const;
};

// The plans of one process by fingerprint.
class Plans {
 public:
  void Add(int64_t plan, std::string_view text, std::string_view program = {});
  const std::map<int64_t, std::shared_ptr<const Plan>>& all() const { return plans_; }
  // Null if it was never added.
  const Plan* Find(int64_t plan) const { return Share(plan).get(); }
  std::shared_ptr<const Plan> Share(int64_t plan) const;
  // "exchange 3 (<description>)", as far as it is known.
  std::string Describe(int64_t plan, int64_t index) const;
  // The same with " of <program>", if the program is known.
  std::string DescribeWithProgram(int64_t plan, int64_t index) const;

 private:
  std::map<int64_t, std::shared_ptr<const Plan>> plans_;
};

// Where two texts begin to differ.
struct TextDifference {
  int64_t line;             // from 0
  std::string_view ours;    // our text from that line on
  std::string_view theirs;  // their text from that line on

  bool exists() const { return !ours.empty() || !theirs.empty(); }
};

// Finds the first line in which two texts differ before the TAB. Without a difference, the result
// is the end of both texts.
TextDifference FirstDifference(std::string_view ours, std::string_view theirs);

// One of two ranks that started different plans.
struct PlanSide {
  std::string rank;  // the rank's name
  const Plan& plan;
};

// Text after the other rank's name in a PlanMismatchError: the programs of the two ranks, their
// first difference, and what to do.
std::string DescribeMismatch(const PlanSide& ours, const PlanSide& theirs);

}  // namespace jaxhet

#endif  // XLA_PLUGIN_ENGINE_COMMON_PLANS_H_
