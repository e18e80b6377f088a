#include "xla_plugin/engine/device/device_handles.h"

#include "xla_plugin/base/error.h"

namespace jaxhet {
namespace {

int SourceOf(const DeviceRequest& request, int rank) {
  return SourceOf(PairsOf(request.ranks), rank);
}

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
  if (request.is_finish) {
    if (handle.is_known) return std::nullopt;  // the data is on the way
    if (SourceOf(request, rank_.rank()) != rank_.rank()) return rank_.Start(request);
    CopyUnlessSame(rank_.device(), request);
    return std::nullopt;
  }
  handle.state.Start(request.plan, request.index);
  handle.group = GroupOf(request.ranks, request.group_size, rank_.rank());
  handle.num_bytes = request.operand.size();
  const Memory& memory = memory_.at({request.handle, handle.num_bytes, handle.group.size()});
  auto* const operand = static_cast<std::byte*>(memory.operand.get());
  handle.result = static_cast<std::byte*>(memory.result.get());
  handle.is_known = true;
  handle.is_done = false;
  CopyUnlessSame(rank_.device(), request);
  rank_.device().Copy(request.stream, operand, request.operand.data(), handle.num_bytes);
  DeviceRequest exchange = request;
  exchange.operand = {operand, handle.num_bytes};
  exchange.result = {handle.result, handle.num_bytes * handle.group.size()};
  return rank_.Start(exchange);
}

void DeviceHandles::Done(const DeviceRequest& request) {
  if (!request.is_finish) return;
  const std::lock_guard lock(mutex_);
  Handle& handle = handles_[request.handle];
  const int source = SourceOf(request, rank_.rank());
  if (!handle.is_known) {
    if (source != rank_.rank()) rank_.Done(request.stream, request.plan, request.index);
    return;
  }
  if (request.result.size() != handle.num_bytes) Throw(ErrorCode::kUsage, kNotLatest);
  if (source == rank_.rank()) handle.state.Finish();
  Await(handle, request.stream);
  const size_t part = PlaceIn(handle.group, source) * handle.num_bytes;
  rank_.device().Copy(request.stream, request.result.data(), handle.result + part,
                      handle.num_bytes);
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
