#ifndef XLA_PLUGIN_ENGINE_OPTIONS_H_
#define XLA_PLUGIN_ENGINE_OPTIONS_H_

#include <cstdint>
#include <map>
#include <string>
#include <variant>

#include "xla_plugin/transport/verbs/options.h"

namespace jaxhet {

struct Options {
  int64_t heartbeat_ms = 500;
  int64_t peer_timeout_ms = 8'000;      // without a word of a peer
  int64_t deadline_ms = 60'000;         // of an exchange, once the peer runs the same plan
  int64_t first_deadline_ms = 600'000;  // until then: the peer may still compile
  int64_t chunk_bytes = 512 << 10;
  int64_t eager_bytes = 16 << 10;  // up to this, bytes travel with the start
  int64_t slot_bytes = 16 << 20;   // of a ring between devices
  std::string encryption = "off";  // of what crosses hosts; see Encryption
  int64_t profiler_ranges = 0;     // 1: each exchange is a range in a profiler
  verbs::Options verbs = {};       // their names begin with "verbs_"
};

using OptionValue = std::variant<int64_t, std::string>;

// Throws UsageError, which lists the names, for one that is unknown, and for a value that is out of
// its range or of the other type.
Options ParseOptions(const std::map<std::string, OptionValue>& values);

}  // namespace jaxhet

#endif  // XLA_PLUGIN_ENGINE_OPTIONS_H_
