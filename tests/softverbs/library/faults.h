#ifndef TESTS_SOFTVERBS_LIBRARY_FAULTS_H_
#define TESTS_SOFTVERBS_LIBRARY_FAULTS_H_

#include <chrono>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace jaxhet::softverbs {

enum class FaultKind : uint8_t {
  kError,      // a send request fails with `status`, after `bytes` of it were executed
  kGhost,      // it and all behind it fail with RETRY_EXC, and are executed `delay` later
  kDelay,      // it begins `delay` later
  kFlush,      // the QP breaks: a fatal event, all its requests are flushed
  kPeerFlush,  // the other end's QP breaks
  kLose,       // writes to memory never arrive, without an error
  kGarble,     // it arrives with a wrong byte
  kCall,       // the entry point `call` fails with `error_number`
};

// Event that faults are compared with. Empty members match every fault.
struct Site {
  std::string_view device;
  int port = 0;
  uint32_t qpn = 0;
  int opcode = 0;
  bool is_dmabuf = false;
  std::string_view call;
};

struct Fault {
  FaultKind kind = FaultKind::kError;
  // Place of a fault: a member without a value matches everything.
  std::string device;
  std::optional<int> port;
  std::optional<uint32_t> qpn;
  std::optional<int> opcode;
  bool only_dmabuf = false;
  std::string call;
  // When: at the matches `after` <= i < `after` + `count`.
  uint64_t after = 0;
  uint64_t count = 1;
  // Effect of the fault.
  int status = 0;
  int error_number = 0;
  uint64_t bytes = 0;
  std::chrono::microseconds delay{0};

  uint64_t matches = 0;
};

inline constexpr uint64_t kAll = std::numeric_limits<uint64_t>::max();

// The faults on order. The NIC's mutex guards it.
class Faults {
 public:
  void Add(const Fault& fault) { faults_.push_back(fault); }
  void Clear() { faults_.clear(); }
  void ClearDelays() {
    std::erase_if(faults_, [](const Fault& fault) { return fault.kind == FaultKind::kDelay; });
  }
  uint64_t num_fired() const { return num_fired_; }

  // The first fault of a kind between `first` and `last` that is due here. Counts matches.
  const Fault* Take(FaultKind first, FaultKind last, const Site& site);

 private:
  std::vector<Fault> faults_;
  uint64_t num_fired_ = 0;
};

}  // namespace jaxhet::softverbs

#endif  // TESTS_SOFTVERBS_LIBRARY_FAULTS_H_
