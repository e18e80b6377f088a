#ifndef XLA_PLUGIN_ENGINE_CONTROL_MESSAGE_CHECKS_H_
#define XLA_PLUGIN_ENGINE_CONTROL_MESSAGE_CHECKS_H_

#include "xla_plugin/engine/common/plans.h"
#include "xla_plugin/engine/common/wire.h"
#include "xla_plugin/engine/control/roster.h"

// Checks of a peer's message by itself: every field must have a value that a sound peer sends.
// All throw TransportError; the caller adds the sender's name.
namespace jaxhet {

// `plan` is the one that the start names, as its sender has sent it; null if it never did.
void CheckStart(const StartInfo& info, const Plan* plan);

// Both ranks, as soon as the job's ranks are known: `sender` starts for a rank of its own, and
// tells a rank of this process.
void CheckRanks(const StartInfo& info, int sender, const Roster& roster);

// A kFail message's error names one of the job's processes.
void CheckFailedProcess(const Error& error, const Roster& roster);

// Throws unless `body`, the rest of a message, is empty.
void CheckEmpty(std::string_view body);

}  // namespace jaxhet

#endif  // XLA_PLUGIN_ENGINE_CONTROL_MESSAGE_CHECKS_H_
