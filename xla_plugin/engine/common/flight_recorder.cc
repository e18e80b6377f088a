#include "xla_plugin/engine/common/flight_recorder.h"

#include <algorithm>
#include <ranges>
#include <utility>

namespace jaxhet {

FlightRecord RecordOf(const Exchange& exchange) {
  const ExchangeRequest& request = exchange.request;
  size_t operand_bytes = 0;
  for (const auto operand : request.operands) operand_bytes += operand.size();
  return {.id = exchange.id,
          .rank = request.rank,
          .kind = request.kind,
          .plan = request.plan,
          .index = request.index,
          .run = exchange.run,
          .sequence = exchange.sequence,
          .operand_bytes = operand_bytes,
          .group = {request.group.begin(), request.group.end()},
          .state = FlightState::kStarted,
          .started = exchange.started,
          .ended = {}};
}

void FlightRecorder::Started(FlightRecord record) {
  if (records_.size() == kRecords) records_.pop_front();
  records_.push_back(std::move(record));
}

void FlightRecorder::Ended(int64_t id, FlightState state, Time now) {
  auto backwards = records_ | std::views::reverse;  // most exchanges that end have started lately
  const auto found = std::ranges::find(backwards, id, &FlightRecord::id);
  if (found == backwards.end()) return;
  found->state = state;
  found->ended = now;
}

}  // namespace jaxhet
