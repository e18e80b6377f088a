#ifndef TESTS_SOFTVERBS_SOFTVERBS_H_
#define TESTS_SOFTVERBS_SOFTVERBS_H_

#include "tests/softverbs/library/control.h"

namespace jaxhet::testing {

// Control of the software libibverbs (library/), which test programs are linked with.
inline softverbs::Control& Softverbs() { return *softverbs_control(); }

// No fault is left behind.
class FaultScope {
 public:
  explicit FaultScope(const softverbs::Fault& fault) { Softverbs().Add(fault); }
  FaultScope(const FaultScope&) = delete;
  FaultScope& operator=(const FaultScope&) = delete;
  ~FaultScope() { Softverbs().Clear(); }
};

}  // namespace jaxhet::testing

#endif  // TESTS_SOFTVERBS_SOFTVERBS_H_
