#ifndef XLA_PLUGIN_FFI_EXCHANGE_H_
#define XLA_PLUGIN_FFI_EXCHANGE_H_

#include "xla/ffi/api/c_api.h"

// The handler of the custom call `jaxhet_exchange` on CPU: hands the buffers to the engine of the
// session and returns a future. Attributes: session, plan, index.
extern "C" XLA_FFI_Error* JaxhetExchange(XLA_FFI_CallFrame* call_frame);

#endif  // XLA_PLUGIN_FFI_EXCHANGE_H_
