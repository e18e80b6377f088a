#ifndef TESTS_CPP_RELAY_H_
#define TESTS_CPP_RELAY_H_

#include <array>
#include <cstddef>
#include <mutex>
#include <string>
#include <thread>

#include "xla_plugin/base/fd.h"

namespace jaxhet::testing {

// Relay between two ends of a connection. It may change the bytes.
class Relay {
 public:
  Relay(Fd first, Fd second);
  ~Relay();
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  // Changes a bit, repeats all, or drops the end of the next bytes that are read together and are
  // at least this many. `place` is the byte that is changed, or dropped first, modulo their number.
  // The middle is for tests that attack one message: it may share its read with small ones before
  // and after it.
  enum class Attack { kNone, kChange, kRepeat, kDrop };
  static constexpr size_t kMiddle = SIZE_MAX;
  void Arm(Attack attack, size_t least_bytes, size_t place = kMiddle);
  bool has_attacked() const;

 private:
  void PassOn(const Fd& from, const Fd& to);
  std::string Changed(std::string bytes);

  std::array<Fd, 2> ends_;
  std::array<std::thread, 2> threads_;
  mutable std::mutex mutex_;  // guards all below
  Attack attack_ = Attack::kNone;
  size_t least_bytes_ = 0;
  size_t place_ = 0;
  bool has_attacked_ = false;
};

}  // namespace jaxhet::testing

#endif  // TESTS_CPP_RELAY_H_
