#ifndef XLA_PLUGIN_ENGINE_HOST_SIBLING_STARTS_H_
#define XLA_PLUGIN_ENGINE_HOST_SIBLING_STARTS_H_

#include <cstdint>
#include <map>
#include <vector>

#include "xla_plugin/engine/common/exchange.h"

namespace jaxhet {

// The exchanges that some ranks of this process have started more often than others: these are
// still in the same execution, and peers will wait for them. A program may end before, when it has
// read the results of the first ranks.
class SiblingStarts {
 public:
  void Add(const ExchangeRequest& request);
  bool AreEven() const { return uneven_.empty(); }
  void Clear() { uneven_.clear(); }

 private:
  struct Entry {
    int64_t run_id;
    int64_t plan;
    int64_t index;
    std::map<int, int64_t> counts;  // by rank

    bool IsOf(const ExchangeRequest& request) const {
      return run_id == request.run_id && plan == request.plan;
    }
    bool IsEven() const;
  };

  // A rank that comes to an execution has ended those before. In a branch of its own, it did not
  // start what the others did.
  void Leave(const ExchangeRequest& request);
  // The oldest execution has ended on all ranks: XLA lets no device be so many executions behind. A
  // rank that has not come to it is in a branch of its own.
  void ForgetOldest();

  std::vector<Entry> uneven_;  // in the order of the first starts
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_ENGINE_HOST_SIBLING_STARTS_H_
