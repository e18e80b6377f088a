#include "xla_plugin/engine/common/options.h"

#include <type_traits>

#include "xla_plugin/base/error.h"

namespace jaxhet {

Options ParseOptions(const std::map<std::string, OptionValue>& values) {
  Options options{};
  const std::map<std::string, std::variant<int64_t*, std::string*>> members = {
      {"heartbeat_ms", &options.heartbeat_ms},
      {"peer_timeout_ms", &options.peer_timeout_ms},
      {"deadline_ms", &options.deadline_ms},
      {"first_deadline_ms", &options.first_deadline_ms},
      {"chunk_bytes", &options.chunk_bytes},
      {"eager_bytes", &options.eager_bytes},
      {"slot_bytes", &options.slot_bytes},
      {"encryption", &options.encryption},
      {"log_level", &options.log_level},
      {"verbs_devices", &options.verbs.devices},
      {"verbs_gid_index", &options.verbs.gid_index},
      {"verbs_pkey_index", &options.verbs.pkey_index},
      {"verbs_qps", &options.verbs.qps},
      {"verbs_depth", &options.verbs.depth},
      {"verbs_traffic_class", &options.verbs.traffic_class},
      {"verbs_service_level", &options.verbs.service_level},
      {"verbs_timeout", &options.verbs.timeout},
      {"verbs_retries", &options.verbs.retries},
  };
  for (const auto& [name, value] : values) {
    if (!members.contains(name))
      Throw(ErrorCode::kUsage, "no engine option is called '", name, "'");
  }
  for (const auto& [name, member] : members) {
    const auto found = values.find(name);
    if (found == values.end() || found->second.index() != member.index()) {
      Throw(ErrorCode::kUsage, "the engine option '", name, "' must be a ",
            member.index() == 0 ? "number" : "text");
    }
    std::visit(
        [&](auto* place) {
          *place = std::get<std::remove_pointer_t<decltype(place)>>(found->second);
        },
        member);
  }
  return options;
}

}  // namespace jaxhet
