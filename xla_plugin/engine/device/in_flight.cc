#include "xla_plugin/engine/device/in_flight.h"

#include <algorithm>

#include "xla_plugin/base/error.h"

namespace jaxhet {

InFlight& InFlightTransfers::Find(uint32_t number) {
  const auto found = std::ranges::find(all, number, &InFlight::number);
  if (found == all.end()) Throw(ErrorCode::kPeer, "the job failed before its done");
  return *found;
}

uint32_t NextNumber(uint32_t& last, uint32_t count) {
  return last = DeviceNumber(uint64_t{last} + count);
}

Marks StreamProgress::NextForChunks(uint64_t first_chunk, uint64_t num_chunks) {
  Marks marks{};
  for (uint64_t i = 0; i < std::min<uint64_t>(num_chunks, kStreams); ++i) {
    const size_t s = (first_chunk + i) % kStreams;
    marks.at(s) = NextFor(s);
  }
  return marks;
}

bool StreamProgress::IsOver(const Marks& marks) const {
  bool is_over = true;
  for (size_t s = 0; s < marks.size(); ++s)
    is_over &= marks.at(s) == 0 || Reached(s) >= marks.at(s);
  return is_over;
}

bool StreamProgress::AreStreamsIdle() const {
  Marks ours{};
  std::copy_n(last_.begin(), kStreams, ours.begin());
  return IsOver(ours);
}

}  // namespace jaxhet
