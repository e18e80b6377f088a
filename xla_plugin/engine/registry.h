#ifndef XLA_PLUGIN_ENGINE_REGISTRY_H_
#define XLA_PLUGIN_ENGINE_REGISTRY_H_

#include <cstdint>
#include <memory>

#include "xla_plugin/engine/engine.h"

namespace jaxhet {

// The table of live engines, by session. It is global because a compiled program can name its
// engine by a number only.
void RegisterEngine(int64_t session, const std::shared_ptr<Engine>& engine);
// Throws UsageError if it does not exist (any more).
std::shared_ptr<Engine> FindEngine(int64_t session);

}  // namespace jaxhet

#endif  // XLA_PLUGIN_ENGINE_REGISTRY_H_
