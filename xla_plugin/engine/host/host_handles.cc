#include "xla_plugin/engine/host/host_handles.h"

#include <algorithm>

namespace jaxhet {
namespace {

// An exchange whose program does not wait for it.
ExchangeRequest Detached(const ExchangeRequest& request, DoneCallback done) {
  ExchangeRequest detached = request;
  detached.is_detached = true;
  detached.done = std::move(done);
  return detached;
}

}  // namespace

ExchangeRequest HostHandles::Start(const ExchangeRequest& request) {
  const std::span<const std::byte> operand = request.operands.at(0);
  const std::lock_guard lock(mutex_);
  std::shared_ptr<Handle>& handle = handles_[{request.rank, request.handle}];
  if (handle == nullptr) handle = std::make_shared<Handle>();
  handle->state.Start(request.plan, request.index);
  handle->group = request.group;
  handle->operand.assign(operand.begin(), operand.end());
  handle->result.resize(operand.size() * request.group.size());
  handle->has_ended = false;
  handle->error.reset();
  std::ranges::copy(operand, request.results.at(0).begin());
  ExchangeRequest exchange =
      Detached(request, [this, handle](const Error* error) { End(*handle, error); });
  exchange.operands = {handle->operand};
  exchange.results = {handle->result};
  return exchange;
}

std::optional<ExchangeRequest> HostHandles::Finish(const ExchangeRequest& request) {
  const std::lock_guard lock(mutex_);
  const auto found = handles_.find({request.rank, request.handle});
  if (found == handles_.end()) return std::nullopt;
  Handle& handle = *found->second;
  const std::span<const std::byte> operand = request.operands.at(0);
  if (handle.state.is_started() && !std::ranges::equal(operand, handle.operand)) {
    Throw(ErrorCode::kUsage, kNotLatest);
  }
  if (SourceOf(request.pairs, request.rank) == request.rank) handle.state.Finish();
  ExchangeRequest meeting = Detached(request, [](const Error*) {});
  meeting.operands.assign(1, {});
  meeting.results.assign(1, {});
  return meeting;
}

void HostHandles::Deliver(const ExchangeRequest& request) {
  std::unique_lock lock(mutex_);
  Handle& handle = *handles_.at({request.rank, request.handle});
  const size_t part =
      PlaceIn(handle.group, SourceOf(request.pairs, request.rank)) * handle.operand.size();
  const Wanted wanted{
      .part = std::span<const std::byte>(handle.result).subspan(part, handle.operand.size()),
      .target = request.results.at(0),
      .done = request.done};
  if (!handle.has_ended) return handle.wanted.push_back(wanted);
  lock.unlock();
  Complete(handle, wanted);
}

void HostHandles::End(Handle& handle, const Error* error) {
  std::vector<Wanted> wanted;
  {
    const std::lock_guard lock(mutex_);
    handle.has_ended = true;
    if (error != nullptr) handle.error = *error;
    wanted.swap(handle.wanted);
  }
  for (const Wanted& each : wanted) Complete(handle, each);
}

// The handle has ended, and does not start again before its finishes are complete.
void HostHandles::Complete(const Handle& handle, const Wanted& wanted) {
  if (handle.error) return wanted.done(&*handle.error);
  std::ranges::copy(wanted.part, wanted.target.begin());
  wanted.done(nullptr);
}

Unfinished HostHandles::unfinished() const {
  const std::lock_guard lock(mutex_);
  Unfinished found;
  for (const auto& [key, handle] : handles_) {
    if (handle->state.is_started()) found.emplace(handle->state.plan(), handle->state.index());
  }
  return found;
}

}  // namespace jaxhet
