#ifndef XLA_PLUGIN_ENGINE_HOST_SIBLING_STARTS_H_
#define XLA_PLUGIN_ENGINE_HOST_SIBLING_STARTS_H_

#include <cstdint>
#include <map>
#include <vector>

#include "xla_plugin/engine/common/exchange.h"

namespace jaxhet {

// Exchanges that some ranks of this process have started and others have not. Peers wait for the
// others, which are still in the execution, even if the program ends after it has read the first
// ranks' results.
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

  // The rank of the request has come to a new execution, so it has ended those before. What it did
  // not start there, it skipped in a branch of its own.
  void Leave(const ExchangeRequest& request);
  // Forgets the oldest execution. All ranks have ended it, since XLA lets no device be so many
  // executions behind; a rank that did not start its exchanges skipped them in a branch of its own.
  void ForgetOldest();

  std::vector<Entry> uneven_;  // in the order of the first starts
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_ENGINE_HOST_SIBLING_STARTS_H_
