#ifndef TESTS_SOFTVERBS_LIBRARY_CONTROL_H_
#define TESTS_SOFTVERBS_LIBRARY_CONTROL_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace jaxhet::softverbs {

enum class FaultKind : uint8_t {
  kError,      // a send request fails with `number`; its first `num_bytes` still arrive
  kGhost,      // it fails with RETRY_EXC; it and all behind it are executed `delay` later
  kDelay,      // it begins `delay` later
  kFlush,      // the QP breaks: all its requests are flushed
  kPeerFlush,  // the other end's QP breaks
  kLose,       // a write to memory never arrives, without an error
  kGarble,     // it arrives with a wrong byte
  kCall,       // the entry point `call` fails with `number`
};

inline constexpr uint64_t kAll = std::numeric_limits<uint64_t>::max();

// Strikes at the matches `after` <= i < `after` + `count`.
struct Fault {
  FaultKind kind = FaultKind::kError;
  int number = 0;  // status of a completion, or errno of a call
  uint64_t after = 0;
  uint64_t count = 1;
  uint64_t num_bytes = 0;
  std::chrono::microseconds delay{0};
  bool only_dmabuf = false;
  const char* call = "";

  uint64_t matches = 0;
};

// Control of the NICs of a process: soft0 and soft1. Functions may be called on any thread.
class Control {
 public:
  virtual void Add(const Fault& fault) = 0;
  // Forgets the faults, and the jitter.
  virtual void Clear() = 0;
  virtual void SetPort(size_t device, bool is_up) = 0;
  // Adds or removes the GID that the product chooses.
  virtual void SetGid(size_t device, bool is_there) = 0;
  // Requests begin up to `most` later, each its own.
  virtual void SetJitter(std::chrono::microseconds most, uint32_t seed) = 0;
  // Pause after a request that is lost.
  virtual void SetRetryInterval(std::chrono::microseconds interval) = 0;
  // Objects that are open.
  virtual int64_t num_objects() = 0;
  virtual uint64_t num_faults_fired() = 0;
  // Send requests that have begun.
  virtual uint64_t num_requests() = 0;

 protected:
  ~Control() = default;
};

}  // namespace jaxhet::softverbs

// Variable of the environment: SOFTVERBS_COPY, a vendor whose first device copies all memory, its
// own too.
extern "C" jaxhet::softverbs::Control* softverbs_control();

#endif  // TESTS_SOFTVERBS_LIBRARY_CONTROL_H_
