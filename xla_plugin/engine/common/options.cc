#include "xla_plugin/engine/common/options.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <type_traits>

#include "xla_plugin/base/error.h"

namespace jaxhet {
namespace {

using Place = std::variant<int64_t*, std::string*>;

struct Option {
  std::string_view name;
  Place (*place)(Options&);
};

// The member of Options, or of its `verbs`.
template <auto Member>
Place At(Options& options) {
  return &(options.*Member);
}
template <auto Member>
Place AtVerbs(Options& options) {
  return &(options.verbs.*Member);
}

constexpr auto kOptions = std::to_array<Option>({
    {"heartbeat_ms", &At<&Options::heartbeat_ms>},
    {"peer_timeout_ms", &At<&Options::peer_timeout_ms>},
    {"deadline_ms", &At<&Options::deadline_ms>},
    {"first_deadline_ms", &At<&Options::first_deadline_ms>},
    {"chunk_bytes", &At<&Options::chunk_bytes>},
    {"eager_bytes", &At<&Options::eager_bytes>},
    {"slot_bytes", &At<&Options::slot_bytes>},
    {"encryption", &At<&Options::encryption>},
    {"log_level", &At<&Options::log_level>},
    {"verbs_devices", &AtVerbs<&verbs::Options::devices>},
    {"verbs_gid_index", &AtVerbs<&verbs::Options::gid_index>},
    {"verbs_pkey_index", &AtVerbs<&verbs::Options::pkey_index>},
    {"verbs_qps", &AtVerbs<&verbs::Options::qps>},
    {"verbs_depth", &AtVerbs<&verbs::Options::depth>},
    {"verbs_traffic_class", &AtVerbs<&verbs::Options::traffic_class>},
    {"verbs_service_level", &AtVerbs<&verbs::Options::service_level>},
    {"verbs_timeout", &AtVerbs<&verbs::Options::timeout>},
    {"verbs_retries", &AtVerbs<&verbs::Options::retries>},
});

std::string Names() {
  std::string names;
  for (const Option& option : kOptions) names += StrCat(names.empty() ? "" : ", ", option.name);
  return names;
}

}  // namespace

Options ParseOptions(const std::map<std::string, OptionValue>& values) {
  for (const auto& [name, value] : values) {
    if (std::ranges::find(kOptions, name, &Option::name) != kOptions.end()) continue;
    Throw(ErrorCode::kUsage, "no engine option is called '", name, "'; there are ", Names());
  }
  Options options{};
  for (const auto& [name, place_in] : kOptions) {
    const auto found = values.find(std::string(name));
    if (found == values.end()) {
      Throw(ErrorCode::kUsage, "the engine option '", name, "' is not given; it needs ", Names());
    }
    const Place place = place_in(options);
    if (found->second.index() != place.index()) {
      Throw(ErrorCode::kUsage, name, " must be a ", place.index() == 0 ? "number" : "text");
    }
    std::visit(
        [&](auto* member) {
          *member = std::get<std::remove_pointer_t<decltype(member)>>(found->second);
        },
        place);
  }
  return options;
}

}  // namespace jaxhet
