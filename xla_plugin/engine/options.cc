#include "xla_plugin/engine/options.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "xla_plugin/base/error.h"

namespace jaxhet {
namespace {

using Place = std::variant<int64_t*, std::string*>;

struct Option {
  std::string_view name;
  Place (*place)(Options&);
  int64_t least = 0;
  int64_t most = 0;
};

constexpr int64_t kMostMs = int64_t{7} * 24 * 3'600'000;
constexpr int64_t kMostBytes = 16 << 20;

// The member of Options, or of its `verbs`.
template <auto Member>
Place At(Options& options) {
  return &(options.*Member);
}
template <auto Member>
Place AtVerbs(Options& options) {
  return &(options.verbs.*Member);
}

constexpr std::array<Option, 18> kOptions = {{
    {"heartbeat_ms", &At<&Options::heartbeat_ms>, 1, kMostMs},
    {"peer_timeout_ms", &At<&Options::peer_timeout_ms>, 1, kMostMs},
    {"deadline_ms", &At<&Options::deadline_ms>, 1, kMostMs},
    {"first_deadline_ms", &At<&Options::first_deadline_ms>, 1, kMostMs},
    {"chunk_bytes", &At<&Options::chunk_bytes>, 1, kMostBytes},
    {"eager_bytes", &At<&Options::eager_bytes>, 0, kMostBytes},
    {"slot_bytes", &At<&Options::slot_bytes>, 4096, kMostBytes},
    {"encryption", &At<&Options::encryption>},
    {"profiler_ranges", &At<&Options::profiler_ranges>, 0, 1},
    {"verbs_devices", &AtVerbs<&verbs::Options::devices>},
    {"verbs_gid_index", &AtVerbs<&verbs::Options::gid_index>, -1, 255},
    {"verbs_pkey_index", &AtVerbs<&verbs::Options::pkey_index>, 0, 65'535},
    {"verbs_qps", &AtVerbs<&verbs::Options::qps>, 1, 16},
    {"verbs_depth", &AtVerbs<&verbs::Options::depth>, 1, 256},
    {"verbs_traffic_class", &AtVerbs<&verbs::Options::traffic_class>, 0, 255},
    {"verbs_service_level", &AtVerbs<&verbs::Options::service_level>, 0, 15},
    {"verbs_timeout", &AtVerbs<&verbs::Options::timeout>, 1, 31},
    {"verbs_retries", &AtVerbs<&verbs::Options::retries>, 0, 7},
}};

std::string Names() {
  std::string names;
  for (const Option& option : kOptions) names += StrCat(names.empty() ? "" : ", ", option.name);
  return names;
}

}  // namespace

Options ParseOptions(const std::map<std::string, OptionValue>& values) {
  Options options;
  for (const auto& [name, value] : values) {
    const auto* found = std::ranges::find(kOptions, name, &Option::name);
    if (found == kOptions.end()) {
      Throw(ErrorCode::kUsage, "no engine option is called '", name, "'; there are ", Names());
    }
    const Place place = found->place(options);
    if (value.index() != place.index()) {
      Throw(ErrorCode::kUsage, name, " must be a ", place.index() == 0 ? "number" : "text");
    }
    if (std::string* const* text = std::get_if<std::string*>(&place)) {
      **text = std::get<std::string>(value);
      continue;
    }
    const int64_t number = std::get<int64_t>(value);
    if (number < found->least || number > found->most) {
      Throw(ErrorCode::kUsage, name, " is ", number, ", but must be ", found->least, " to ",
            found->most);
    }
    *std::get<int64_t*>(place) = number;
  }
  return options;
}

}  // namespace jaxhet
