#ifndef TESTS_SOFTVERBS_SOFTVERBS_H_
#define TESTS_SOFTVERBS_SOFTVERBS_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "xla_plugin/base/library.h"

namespace jaxhet::testing {

// The software libibverbs (library/), loaded. Whoever loads libibverbs.so.1 after it gets it.
class Softverbs {
 public:
  static const Softverbs& Get();

  // See library/control.h. Throws the error of `text`.
  void Command(std::string_view text) const;
  // How memory is copied from now on, a GPU's too; nullptr: as the host's.
  void SetCopy(void (*copy)(void* to, const void* from, size_t num_bytes)) const;
  // "contexts 0 pds 0 mrs 0 cqs 0 channels 0 qps 0".
  std::string Objects() const { return Query("objects"); }
  uint64_t num_faults_fired() const { return std::stoull(Query("faults")); }
  uint64_t num_requests() const { return std::stoull(Query("requests")); }
  // With a space after each.
  std::string QpNumbers() const { return Query("qps"); }

 private:
  Softverbs();
  std::string Query(const char* what) const;

  Library library_;
};

// No fault is left behind.
class FaultScope {
 public:
  explicit FaultScope(std::string_view command) { Softverbs::Get().Command(command); }
  FaultScope(const FaultScope&) = delete;
  FaultScope& operator=(const FaultScope&) = delete;
  ~FaultScope() { Softverbs::Get().Command("clear; jitter 0"); }
};

}  // namespace jaxhet::testing

#endif  // TESTS_SOFTVERBS_SOFTVERBS_H_
