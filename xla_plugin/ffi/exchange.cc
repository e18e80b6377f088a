#include "xla_plugin/ffi/exchange.h"

#include <cstdint>
#include <span>
#include <utility>

#include "xla_plugin/engine/registry.h"
#include "xla_plugin/ffi/attributes.h"

namespace jaxhet {
namespace {

namespace ffi = xla::ffi;

struct Attributes {
  int64_t session, kind, plan, index;
  ffi::Span<const int64_t> ranks;
  int64_t group_size, deadline_ms;
};

void AddBuffers(ffi::RemainingArgs operands, ffi::RemainingRets results, ExchangeRequest& request) {
  for (size_t i = 0; i < operands.size(); ++i) {
    request.operands.push_back(Bytes(operands.get<ffi::AnyBuffer>(i).value()));
  }
  for (size_t i = 0; i < results.size(); ++i) {
    ffi::Result<ffi::AnyBuffer> buffer = results.get<ffi::AnyBuffer>(i).value();
    request.results.push_back(Bytes(buffer));
  }
}

void Start(const Attributes& attributes, int64_t device_id, ffi::RunId run_id,
           ExchangeRequest request) {
  const std::shared_ptr<Engine> engine = FindEngine(attributes.session);
  request.rank = engine->RankOfDevice(device_id);
  request.run_id = run_id.run_id;
  request.kind = static_cast<ExchangeKind>(attributes.kind);
  request.plan = attributes.plan;
  request.index = attributes.index;
  const std::span<const int64_t> ranks = ToSpan(attributes.ranks);
  if (request.kind == ExchangeKind::kPermute) {
    request.pairs = PairsOf(ranks);
    request.group = ConnectedTo(request.rank, request.pairs);
  } else {
    request.group = GroupOf(ranks, attributes.group_size, request.rank);
    request.group_size = static_cast<size_t>(attributes.group_size);
  }
  request.siblings = engine->SiblingsOf(request.rank, ranks);
  request.deadline_ms = attributes.deadline_ms;
  engine->Start(std::move(request));
}

ffi::Future StartExchange(ffi::RunId run_id, int32_t device_id, int64_t session, int64_t kind,
                          int64_t plan, int64_t index, ffi::Span<const int64_t> ranks,
                          int64_t group_size, int64_t deadline_ms, ffi::RemainingArgs operands,
                          ffi::RemainingRets results) {
  ffi::Promise promise;
  ffi::Future future(promise);
  ExchangeRequest request;
  request.done = [promise](const Error* error) mutable {
    if (error == nullptr) {
      promise.SetAvailable();
    } else {
      promise.SetError(ToFfiError(*error));
    }
  };
  const DoneCallback done = request.done;
  try {
    AddBuffers(operands, results, request);
    Start({session, kind, plan, index, ranks, group_size, deadline_ms}, device_id, run_id,
          std::move(request));
  } catch (...) {  // nothing may cross XLA's C interface
    const Error error = CurrentError();
    done(&error);
  }
  return future;
}

}  // namespace
}  // namespace jaxhet

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxhetExchange, jaxhet::StartExchange,
                              jaxhet::BindAttributes(xla::ffi::Ffi::Bind()
                                                         .Ctx<xla::ffi::RunId>()
                                                         .Ctx<xla::ffi::DeviceOrdinal>())
                                  .RemainingArgs()
                                  .RemainingRets());
