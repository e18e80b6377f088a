#include "xla_plugin/engine/flight_recorder.h"

#include <algorithm>

namespace jaxhet {

void FlightRecorder::Started(const Exchange& exchange) {
  const ExchangeRequest& request = exchange.request;
  size_t operand_bytes = 0;
  for (const auto operand : request.operands) operand_bytes += operand.size();
  if (records_.size() == kRecords) records_.pop_front();
  records_.push_back({.id = exchange.id,
                      .rank = request.rank,
                      .kind = request.kind,
                      .plan = request.plan,
                      .index = request.index,
                      .run = exchange.run,
                      .sequence = exchange.sequence,
                      .operand_bytes = operand_bytes,
                      .group = request.group,
                      .state = FlightState::kStarted,
                      .started = exchange.started,
                      .ended = {}});
}

void FlightRecorder::Ended(const Exchange& exchange, FlightState state, Time now) {
  const auto found = std::ranges::find(records_, exchange.id, &FlightRecord::id);
  if (found == records_.end()) return;
  found->state = state;
  found->ended = now;
}

}  // namespace jaxhet
