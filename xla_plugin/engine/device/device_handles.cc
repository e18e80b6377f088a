#include "xla_plugin/engine/device/device_handles.h"

#include "xla_plugin/base/error.h"

namespace jaxhet {
namespace {

void CopyUnlessSame(Device& device, const DeviceRequest& request) {
  if (request.result.data() == request.operand.data()) return;
  device.Copy(request.stream, request.result.data(), request.operand.data(),
              request.operand.size());
}

}  // namespace

DeviceHandles::DeviceHandles(DeviceRank& rank)
    : rank_(rank), stream_(rank.device().CreateStream(StreamPriority::kNormal)) {}

void DeviceHandles::Reserve(int64_t handle, size_t operand_bytes, size_t group_size) {
  const std::lock_guard lock(mutex_);
  Memory& memory = memory_[{handle, operand_bytes, group_size}];
  if (memory.operand.get() != nullptr) return;
  memory.operand = rank_.device().Allocate(operand_bytes);
  memory.result = rank_.device().Allocate(operand_bytes * group_size);
}

std::optional<LaunchMismatch> DeviceHandles::Start(const DeviceRequest& request) {
  const std::lock_guard lock(mutex_);
  Handle& handle = handles_[request.handle];
  DeviceRequest exchange = request;
  if (request.is_finish) {
    const bool is_own = SourceOf(request.pairs, request.rank) == request.rank;
    if (is_own && !handle.is_known) CopyUnlessSame(rank_.device(), request);
    if (is_own) return std::nullopt;
    if (!handle.is_known) return rank_.Start(request);
    exchange.operand = {};  // the data is on the way; the ranks compare their programs
    exchange.result = {};
  } else {
    handle.state.Start(request.plan, request.index);
    handle.group = request.group;
    handle.num_bytes = request.operand.size();
    const auto memory = memory_.find({request.handle, handle.num_bytes, handle.group.size()});
    if (memory == memory_.end()) {
      Throw(ErrorCode::kUsage, "the plan of this jaxhet.start has no memory for ", handle.num_bytes,
            " bytes of ", handle.group.size(),
            " ranks; please report this with a dump (JAXHET_DUMP)");
    }
    auto* const operand = static_cast<std::byte*>(memory->second.operand.get());
    handle.result = static_cast<std::byte*>(memory->second.result.get());
    handle.is_known = true;
    handle.is_done = false;
    CopyUnlessSame(rank_.device(), request);
    rank_.device().Copy(request.stream, operand, request.operand.data(), handle.num_bytes);
    exchange.operand = {operand, handle.num_bytes};
    exchange.result = {handle.result, handle.num_bytes * handle.group.size()};
  }
  exchange.is_detached = true;
  return rank_.Start(exchange);
}

void DeviceHandles::Done(const DeviceRequest& request) {
  if (!request.is_finish) return;
  const std::lock_guard lock(mutex_);
  Handle& handle = handles_[request.handle];
  const int source = SourceOf(request.pairs, request.rank);
  if (!handle.is_known) {
    if (source != request.rank) rank_.Done(request.stream, request.plan, request.index);
    return;
  }
  if (request.result.size() != handle.num_bytes) Throw(ErrorCode::kUsage, kNotLatest);
  if (source == request.rank) handle.state.Finish();
  Await(handle, request.stream);
  const size_t part = PlaceIn(handle.group, source) * handle.num_bytes;
  rank_.device().Copy(request.stream, request.result.data(), handle.result + part,
                      handle.num_bytes);
  if (source != request.rank) rank_.Done(stream_.get(), request.plan, request.index);
}

void DeviceHandles::Await(Handle& handle, StreamHandle stream) {
  if (!handle.is_done) rank_.Done(stream, handle.state.plan(), handle.state.index());
  handle.is_done = true;
}

void DeviceHandles::Drain() {
  const std::lock_guard lock(mutex_);
  for (auto& [key, handle] : handles_) {
    if (handle.state.is_started()) Await(handle, stream_.get());
  }
}

Unfinished DeviceHandles::unfinished() const {
  const std::lock_guard lock(mutex_);
  Unfinished found;
  for (const auto& [key, handle] : handles_) {
    if (handle.state.is_started()) found.emplace(handle.state.plan(), handle.state.index());
  }
  return found;
}

}  // namespace jaxhet
