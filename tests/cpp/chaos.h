#ifndef TESTS_CPP_CHAOS_H_
#define TESTS_CPP_CHAOS_H_

#include <sys/types.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tests/cpp/relay.h"
#include "xla_plugin/base/fd.h"

// Jobs of two or three processes, on CPUs or on devices, with one random fault each.
namespace jaxhet::testing {

enum class Fault : uint8_t {
  kNone,
  kKill,
  kStop,
  kCutControl,
  kCutData,
  kCorruptControl,  // bytes changed, repeated or dropped on the way, where they are authenticated
  kCorruptData,
};
std::string_view NameOf(Fault fault);
inline bool IsOfConnection(Fault fault) { return fault >= Fault::kCutControl; }
inline bool IsCorruption(Fault fault) { return fault >= Fault::kCorruptControl; }

// Random choices of a round. A seed makes the same round everywhere.
struct ChaosRound {
  explicit ChaosRound(uint64_t its_seed);

  // Transport and encryption, as "socket auth" or "devices: socket auth".
  std::string Path() const;

  uint64_t seed;
  bool on_devices;  // ranks are devices, whose memory and streams are the host's
  std::string transport;
  std::string encryption;
  int num_processes;
  Fault fault;
  int victim;
  int other;  // at the other end of the connection
  std::chrono::microseconds delay;
  std::chrono::milliseconds stop_time;
  std::vector<size_t> sizes;  // bytes of each rank, by exchange
  Relay::Attack attack;       // a corruption, and where
  size_t place;
};

// Report of a process on its own end.
struct ChaosOutcome {
  enum class Kind : int32_t { kSilent, kRight, kError, kWrong };

  // "killed", "right" or the class of the error.
  std::string Name() const;
  std::string_view Text() const { return text.data(); }
  void Say(Kind its_kind, std::string_view its_text);

  Kind kind = Kind::kSilent;
  int32_t num_leaked_fds = 0;
  int32_t num_leaked_mappings = 0;
  std::array<char, 400> text{};
};

// The running processes of a round: forks of this one.
class ChaosJob {
 public:
  explicit ChaosJob(const ChaosRound& round);
  ChaosJob(const ChaosJob&) = delete;
  ChaosJob& operator=(const ChaosJob&) = delete;

  // Waits for the round's moment and brings its fault about.
  void Break();
  // Outcomes by rank. A process that reports nothing within `longest` is silent, and killed.
  std::vector<ChaosOutcome> Wait(std::chrono::milliseconds longest);

 private:
  const ChaosRound& round_;
  std::vector<pid_t> pids_;
  std::vector<Fd> reports_;
  Fd connection_;                 // a copy of the victim's end, for faults of a connection
  std::unique_ptr<Relay> relay_;  // in that connection, for its corruption
};

}  // namespace jaxhet::testing

#endif  // TESTS_CPP_CHAOS_H_
