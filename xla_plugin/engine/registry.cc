#include "xla_plugin/engine/registry.h"

#include <map>
#include <mutex>

#include "xla_plugin/base/error.h"

namespace jaxhet {
namespace {

struct Table {
  std::mutex mutex;
  std::map<int64_t, std::weak_ptr<Engine>> engines;
};

Table& TheTable() {
  static auto* const table = new Table;  // outlives every thread
  return *table;
}

}  // namespace

void RegisterEngine(int64_t session, const std::shared_ptr<Engine>& engine) {
  Table& table = TheTable();
  const std::lock_guard lock(table.mutex);
  std::erase_if(table.engines, [](const auto& entry) { return entry.second.expired(); });
  if (!table.engines.try_emplace(session, engine).second) {
    Throw(ErrorCode::kUsage, "session ", session, " has an engine already");
  }
}

std::shared_ptr<Engine> FindEngine(int64_t session) {
  Table& table = TheTable();
  const std::lock_guard lock(table.mutex);
  const auto found = table.engines.find(session);
  std::shared_ptr<Engine> engine = found == table.engines.end() ? nullptr : found->second.lock();
  if (!engine) {
    Throw(ErrorCode::kUsage, "the program was compiled for session ", session,
          ", which has ended. Call jax.clear_caches() after jaxhet.shutdown().");
  }
  return engine;
}

}  // namespace jaxhet
