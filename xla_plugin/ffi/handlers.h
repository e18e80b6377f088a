#ifndef XLA_PLUGIN_FFI_HANDLERS_H_
#define XLA_PLUGIN_FFI_HANDLERS_H_

#include "xla/ffi/api/c_api.h"

// The handlers of the engine's custom calls. Their attributes are session, plan and index.
extern "C" {

// results = jaxhet_exchange(operands) on a CPU, which returns a future.
XLA_FFI_Error* JaxhetExchange(XLA_FFI_CallFrame* call_frame);

// An exchange on a GPU: y = jaxhet_start(x), then y = jaxhet_done(y, x) in the same buffer. Both
// put work on streams (see DeviceRank), and x lives until the done. If the result arrives in parts,
// the done waits for the first one. Each (y, z) = jaxhet_part(y, z), in place, waits for the next
// part; later uses of y and z come after it.
XLA_FFI_Error* JaxhetStart(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JaxhetDone(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JaxhetPart(XLA_FFI_CallFrame* call_frame);
}

#endif  // XLA_PLUGIN_FFI_HANDLERS_H_
