#include "xla_plugin/ffi/handlers.h"

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "xla/ffi/api/ffi.h"
#include "xla_plugin/base/error.h"
#include "xla_plugin/engine/engine.h"

namespace jaxhet {
namespace {

namespace ffi = xla::ffi;

// Indexed by ErrorCode.
constexpr std::array<ffi::ErrorCode, kErrorNames.size()> kFfiCodes = {
    ffi::ErrorCode::kInvalidArgument, ffi::ErrorCode::kFailedPrecondition,
    ffi::ErrorCode::kUnavailable,     ffi::ErrorCode::kDeadlineExceeded,
    ffi::ErrorCode::kUnavailable,     ffi::ErrorCode::kInternal};

ffi::Error ToFfiError(const Error& error) {
  return {kFfiCodes.at(static_cast<size_t>(error.code())), error.what()};
}

std::span<const std::byte> Bytes(const ffi::AnyBuffer& buffer) {
  return {static_cast<const std::byte*>(buffer.untyped_data()), buffer.size_bytes()};
}

std::span<std::byte> Bytes(ffi::Result<ffi::AnyBuffer>& buffer) {
  return {static_cast<std::byte*>(buffer->untyped_data()), buffer->size_bytes()};
}

// The place of a call's exchange; the engine knows the rest by the plan.
struct Place {
  int64_t session;
  int64_t plan;
  int64_t index;
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
    ExchangeRequest request{*engine->Planned(plan, index, engine->RankOfDevice(device_id))};
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

// Byte that fills a poisoned result: every byte of a NaN. Integers have no NaN and get a value that
// programs seldom use; programs with them learn of the failure by an error only.
std::byte PoisonOf(ffi::DataType type) {
  switch (type) {
    case ffi::F8E4M3B11FNUZ:
    case ffi::F8E4M3FNUZ:
    case ffi::F8E5M2FNUZ:
      return std::byte{0x80};
    case ffi::PRED:
      return std::byte{0};
    default:
      return std::byte{0xFF};
  }
}

// Calls `function` with the devices, and the planned exchange of one of them.
template <typename Function>
ffi::Error OnDevice(StreamHandle stream, int32_t ordinal, Place place, Function function) {
  try {
    const std::shared_ptr<Engine> engine = FindEngine(place.session);
    const auto devices = engine->devices();
    DeviceRequest request{
        *engine->Planned(place.plan, place.index, devices->RankOf(ordinal).rank())};
    request.stream = stream;
    function(*devices, request);
    return ffi::Error::Success();
  } catch (...) {  // nothing may cross XLA's C interface
    return ToFfiError(CurrentError());
  }
}

ffi::Error Start(StreamHandle stream, int32_t ordinal, int64_t session, int64_t plan, int64_t index,
                 ffi::AnyBuffer operand, ffi::Result<ffi::AnyBuffer> result) {
  return OnDevice(stream, ordinal, {session, plan, index},
                  [&](DeviceEngine& devices, DeviceRequest& request) {
                    request.operand = Bytes(operand);
                    request.result = Bytes(result);
                    request.poison = PoisonOf(operand.element_type());
                    devices.Start(ordinal, request);
                  });
}

void CheckInPlace(int64_t index, const ffi::AnyBuffer& operand,
                  ffi::Result<ffi::AnyBuffer>& result) {
  if (operand.untyped_data() == result->untyped_data()) return;
  Throw(ErrorCode::kUsage, "XLA gave exchange ", index,
        " two results; please report this with a dump (JAXHET_DUMP)");
}

ffi::Error Done(StreamHandle stream, int32_t ordinal, int64_t session, int64_t plan, int64_t index,
                ffi::AnyBuffer started, ffi::AnyBuffer /*operand*/,
                ffi::Result<ffi::AnyBuffer> result) {
  return OnDevice(stream, ordinal, {session, plan, index},
                  [&](DeviceEngine& devices, DeviceRequest& request) {
                    CheckInPlace(index, started, result);
                    request.result = Bytes(result);
                    devices.Done(ordinal, request);
                  });
}

ffi::Error Part(StreamHandle stream, int32_t ordinal, int64_t session, int64_t plan, int64_t index,
                ffi::AnyBuffer received, ffi::AnyBuffer other,
                ffi::Result<ffi::AnyBuffer> received_result,
                ffi::Result<ffi::AnyBuffer> other_result) {
  return OnDevice(stream, ordinal, {session, plan, index},
                  [&](DeviceEngine& devices, const DeviceRequest& request) {
                    CheckInPlace(index, received, received_result);
                    CheckInPlace(index, other, other_result);
                    devices.Done(ordinal, request);
                  });
}

// Attributes in the order of the handlers' parameters.
template <typename Binding>
auto BindAttributes(Binding binding) {
  return std::move(binding)
      .template Attr<int64_t>("session")
      .template Attr<int64_t>("plan")
      .template Attr<int64_t>("index");
}

auto BindDevice() {
  return BindAttributes(
      ffi::Ffi::Bind().Ctx<ffi::PlatformStream<StreamHandle>>().Ctx<ffi::DeviceOrdinal>());
}

}  // namespace
}  // namespace jaxhet

using xla::ffi::AnyBuffer;

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxhetExchange, jaxhet::StartExchange,
                              jaxhet::BindAttributes(xla::ffi::Ffi::Bind()
                                                         .Ctx<xla::ffi::RunId>()
                                                         .Ctx<xla::ffi::DeviceOrdinal>())
                                  .RemainingArgs()
                                  .RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxhetStart, jaxhet::Start,
                              jaxhet::BindDevice().Arg<AnyBuffer>().Ret<AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JaxhetDone, jaxhet::Done,
    jaxhet::BindDevice().Arg<AnyBuffer>().Arg<AnyBuffer>().Ret<AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JaxhetPart, jaxhet::Part,
    jaxhet::BindDevice().Arg<AnyBuffer>().Arg<AnyBuffer>().Ret<AnyBuffer>().Ret<AnyBuffer>());
