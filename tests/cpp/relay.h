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

  // Changes a bit, repeats all, or drops the end of the next bytes that are read together. `place`
  // is the byte that is changed, or dropped first, modulo their number.
  enum class Attack { kNone, kChange, kRepeat, kDrop };
  void Arm(Attack attack, size_t place);

 private:
  void PassOn(const Fd& from, const Fd& to);
  std::string Changed(std::string bytes);

  std::array<Fd, 2> ends_;
  std::array<std::thread, 2> threads_;
  std::mutex mutex_;  // guards all below
  Attack attack_ = Attack::kNone;
  size_t place_ = 0;
};

}  // namespace jaxhet::testing

#endif  // TESTS_CPP_RELAY_H_
