#ifndef XLA_PLUGIN_TRANSPORT_PROCESS_VM_PROCESS_VM_H_
#define XLA_PLUGIN_TRANSPORT_PROCESS_VM_PROCESS_VM_H_

#include <memory>

#include "xla_plugin/transport/transport.h"

namespace jaxhet {

// Between processes of one host where the kernel allows process_vm_readv: one copy, from the
// sender's memory into the receiver's.
std::unique_ptr<Connection> OpenProcessVm(const TransportSetup& setup, ConnectionHost& host);

}  // namespace jaxhet

#endif  // XLA_PLUGIN_TRANSPORT_PROCESS_VM_PROCESS_VM_H_
