#ifndef XLA_PLUGIN_FFI_DEVICE_EXCHANGE_H_
#define XLA_PLUGIN_FFI_DEVICE_EXCHANGE_H_

#include "xla/ffi/api/c_api.h"

// y = jaxhet_start(x) and jaxhet_done(y, x): an exchange on a GPU. They put work on streams; see
// DeviceRank. done's result is y's buffer, and x lives until then.
extern "C" XLA_FFI_Error* JaxhetStart(XLA_FFI_CallFrame* call_frame);
extern "C" XLA_FFI_Error* JaxhetDone(XLA_FFI_CallFrame* call_frame);

#endif  // XLA_PLUGIN_FFI_DEVICE_EXCHANGE_H_
