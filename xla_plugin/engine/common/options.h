#ifndef XLA_PLUGIN_ENGINE_COMMON_OPTIONS_H_
#define XLA_PLUGIN_ENGINE_COMMON_OPTIONS_H_

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <variant>

#include "xla_plugin/net/verbs/nics.h"

namespace jaxhet {

// No member has a default: those are in the table of jaxhet/_options.py, with the ranges.
struct Options {
  int64_t heartbeat_ms;
  int64_t peer_timeout_ms;    // longest silence of a peer
  int64_t deadline_ms;        // longest wait of an exchange for a peer that runs the same plan
  int64_t first_deadline_ms;  // the same before the first such exchange: the peer may still compile
  int64_t chunk_bytes;
  int64_t eager_bytes;     // largest message that travels with its start
  int64_t slot_bytes;      // largest slot of a channel between devices
  std::string encryption;  // see Encryption
  std::string log_level;   // see LeastSeverity()
  verbs::Options verbs;    // option names begin with "verbs_"
};

// Silence of a network path after which it has failed. A silent process is found before.
inline std::chrono::milliseconds PathTimeout(const Options& options) {
  return std::chrono::milliseconds(options.peer_timeout_ms + 2 * options.heartbeat_ms);
}

using OptionValue = std::variant<int64_t, std::string>;

// Throws UsageError if a name is unknown or not given, or if a value has the other type. The caller
// has checked the ranges.
Options ParseOptions(const std::map<std::string, OptionValue>& values);

}  // namespace jaxhet

#endif  // XLA_PLUGIN_ENGINE_COMMON_OPTIONS_H_
