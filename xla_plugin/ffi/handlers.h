#ifndef XLA_PLUGIN_FFI_HANDLERS_H_
#define XLA_PLUGIN_FFI_HANDLERS_H_

#include "xla/ffi/api/c_api.h"

// The handlers of the engine's custom calls. Their attributes are session, plan and index.
extern "C" {

// results = jaxhet_exchange(operands) on a CPU, which returns a future.
XLA_FFI_Error* JaxhetExchange(XLA_FFI_CallFrame* call_frame);

// y = jaxhet_start(x) and jaxhet_done(y, x): an exchange on a GPU. They put work on streams; see
// DeviceRank. done's result is y's buffer, and x lives until then. Of what comes in parts, that is
// the first; (y, z) = jaxhet_part(y, z), in their buffers, waits for the next one, before what is
// then done with y and z.
XLA_FFI_Error* JaxhetStart(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JaxhetDone(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JaxhetPart(XLA_FFI_CallFrame* call_frame);
}

#endif  // XLA_PLUGIN_FFI_HANDLERS_H_
