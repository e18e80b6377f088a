#include "xla_plugin/ffi/exchange.h"

#include <cstdint>
#include <span>
#include <utility>

#include "xla_plugin/engine/registry.h"
#include "xla_plugin/ffi/attributes.h"

namespace jaxhet {
namespace {

namespace ffi = xla::ffi;

void AddBuffers(ffi::RemainingArgs operands, ffi::RemainingRets results, ExchangeRequest& request) {
  for (size_t i = 0; i < operands.size(); ++i) {
    request.operands.push_back(Bytes(operands.get<ffi::AnyBuffer>(i).value()));
  }
  for (size_t i = 0; i < results.size(); ++i) {
    ffi::Result<ffi::AnyBuffer> buffer = results.get<ffi::AnyBuffer>(i).value();
    request.results.push_back(Bytes(buffer));
  }
}

ffi::Future StartExchange(ffi::RunId run_id, int32_t device_id, int64_t session, int64_t plan,
                          int64_t index, ffi::RemainingArgs operands, ffi::RemainingRets results) {
  ffi::Promise promise;
  ffi::Future future(promise);
  const DoneCallback done = [promise](const Error* error) mutable {
    if (error == nullptr) {
      promise.SetAvailable();
    } else {
      promise.SetError(ToFfiError(*error));
    }
  };
  try {
    const std::shared_ptr<Engine> engine = FindEngine(session);
    ExchangeRequest request = engine->PlannedRequest(plan, index, engine->RankOfDevice(device_id));
    request.run_id = run_id.run_id;
    request.done = done;
    AddBuffers(operands, results, request);
    engine->Start(std::move(request));
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
