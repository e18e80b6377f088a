#ifndef XLA_PLUGIN_ENGINE_COMMON_FLIGHT_RECORDER_H_
#define XLA_PLUGIN_ENGINE_COMMON_FLIGHT_RECORDER_H_

#include <algorithm>
#include <cstdint>
#include <deque>
#include <ranges>
#include <utility>
#include <vector>

#include "xla_plugin/engine/common/exchange.h"

namespace jaxhet {

enum class FlightState : uint8_t { kStarted, kCompleted, kFailed };

// For exchanges between devices a record describes one rank: id and sequence are the exchange's
// number on that rank, run is 0, and the group is the rank and its partners. Times are those at
// which the watch first observed that the device had started the exchange, and that it had ended.
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
  Time ended;  // Time{} in the state kStarted
};

// The last exchanges of this process, or of one of its devices.
class FlightRecorder {
 public:
  void Started(FlightRecord record) {
    if (records_.size() == kRecords) records_.pop_front();
    records_.push_back(std::move(record));
  }
  void Ended(int64_t id, FlightState state, Time now) {
    auto backwards = records_ | std::views::reverse;  // most exchanges that end have started lately
    const auto found = std::ranges::find(backwards, id, &FlightRecord::id);
    if (found == backwards.end()) return;
    found->state = state;
    found->ended = now;
  }
  const std::deque<FlightRecord>& records() const { return records_; }

 private:
  static constexpr size_t kRecords = 4096;

  std::deque<FlightRecord> records_;
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_ENGINE_COMMON_FLIGHT_RECORDER_H_
