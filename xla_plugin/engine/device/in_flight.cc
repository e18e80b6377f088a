#include "xla_plugin/engine/device/in_flight.h"

#include <algorithm>

#include "xla_plugin/base/error.h"

namespace jaxhet {

InFlight& InFlightTransfers::Find(uint32_t number) {
  const auto found = std::ranges::find(all, number, &InFlight::number);
  if (found == all.end()) Throw(ErrorCode::kPeer, "the job failed before its done");
  return *found;
}

}  // namespace jaxhet
