#include "xla_plugin/ffi/device_exchange.h"

#include <cstdint>
#include <memory>
#include <utility>

#include "xla_plugin/engine/registry.h"
#include "xla_plugin/ffi/attributes.h"

namespace jaxhet {
namespace {

namespace ffi = xla::ffi;

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

template <typename Function>
ffi::Error Guarded(Function function) {
  try {
    function();
    return ffi::Error::Success();
  } catch (...) {  // nothing may cross XLA's C interface
    return ToFfiError(CurrentError());
  }
}

ffi::Error Start(StreamHandle stream, int32_t ordinal, int64_t session, int64_t plan, int64_t index,
                 ffi::AnyBuffer operand, ffi::Result<ffi::AnyBuffer> result) {
  return Guarded([&] {
    const std::shared_ptr<Engine> engine = FindEngine(session);
    const auto devices = engine->devices();
    const auto planned = engine->Planned(plan, index, devices->RankOf(ordinal).rank());
    devices->Start(ordinal, {.stream = stream,
                             .kind = planned->kind,
                             .plan = plan,
                             .index = index,
                             .deadline_ms = planned->deadline_ms,
                             .ranks = planned->ranks,
                             .group_size = planned->group_size,
                             .skips_own = planned->skips_own,
                             .part_bytes = planned->part_bytes,
                             .operand = Bytes(operand),
                             .result = Bytes(result),
                             .poison = PoisonOf(operand.element_type()),
                             .handle = planned->handle,
                             .is_finish = planned->is_finish});
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
  return Guarded([&] {
    CheckInPlace(index, started, result);
    const std::shared_ptr<Engine> engine = FindEngine(session);
    const auto devices = engine->devices();
    const auto planned = engine->Planned(plan, index, devices->RankOf(ordinal).rank());
    if (planned->handle == 0) return devices->Done(ordinal, stream, plan, index);
    devices->DoneHalf(ordinal, {.stream = stream,
                                .plan = plan,
                                .index = index,
                                .ranks = planned->ranks,
                                .operand = {},
                                .result = Bytes(result),
                                .poison = {},
                                .handle = planned->handle,
                                .is_finish = planned->is_finish});
  });
}

ffi::Error Part(StreamHandle stream, int32_t ordinal, int64_t session, int64_t plan, int64_t index,
                ffi::AnyBuffer received, ffi::AnyBuffer other,
                ffi::Result<ffi::AnyBuffer> received_result,
                ffi::Result<ffi::AnyBuffer> other_result) {
  return Guarded([&] {
    CheckInPlace(index, received, received_result);
    CheckInPlace(index, other, other_result);
    const std::shared_ptr<Engine> engine = FindEngine(session);
    engine->devices()->Done(ordinal, stream, plan, index);
  });
}

auto Bind() {
  return BindAttributes(
      ffi::Ffi::Bind().Ctx<ffi::PlatformStream<StreamHandle>>().Ctx<ffi::DeviceOrdinal>());
}

}  // namespace
}  // namespace jaxhet

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxhetStart, jaxhet::Start,
                              jaxhet::Bind().Arg<xla::ffi::AnyBuffer>().Ret<xla::ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxhetDone, jaxhet::Done,
                              jaxhet::Bind()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxhetPart, jaxhet::Part,
                              jaxhet::Bind()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>());
