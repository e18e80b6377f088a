#ifndef XLA_PLUGIN_ENGINE_FLIGHT_RECORDER_H_
#define XLA_PLUGIN_ENGINE_FLIGHT_RECORDER_H_

#include <cstdint>
#include <deque>
#include <vector>

#include "xla_plugin/engine/exchange.h"

namespace jaxhet {

enum class FlightState : uint8_t { kStarted, kCompleted, kFailed };

// An exchange between devices is one rank's: its id and its sequence are its number there, its run
// is 0, and its group is the rank and its partners. Its times are those at which the watch saw that
// the device had come to it, and that it was over.
struct FlightRecord {
  int64_t id;
  int rank;
  ExchangeKind kind;
  int64_t plan;
  int64_t index;
  int64_t run;
  int64_t sequence;
  size_t operand_bytes;
  std::vector<int> group;
  FlightState state;
  Time started;
  Time ended;  // of the state kStarted: Time{}
};

// Record of an exchange that starts.
FlightRecord RecordOf(const Exchange& exchange);

// The last exchanges of this process, or of one of its devices.
class FlightRecorder {
 public:
  void Started(FlightRecord record);
  void Ended(int64_t id, FlightState state, Time now);
  const std::deque<FlightRecord>& records() const { return records_; }

 private:
  static constexpr size_t kRecords = 4096;

  std::deque<FlightRecord> records_;
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_ENGINE_FLIGHT_RECORDER_H_
