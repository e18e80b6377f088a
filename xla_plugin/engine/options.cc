#include "xla_plugin/engine/options.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "xla_plugin/base/error.h"

namespace jaxhet {
namespace {

struct Option {
  std::string_view name;
  int64_t Options::* member;
  int64_t least;
  int64_t most;
};

constexpr int64_t kMostMs = int64_t{7} * 24 * 3'600'000;
constexpr int64_t kMostBytes = 16 << 20;

constexpr std::array<Option, 7> kOptions = {{
    {"heartbeat_ms", &Options::heartbeat_ms, 1, kMostMs},
    {"peer_timeout_ms", &Options::peer_timeout_ms, 1, kMostMs},
    {"deadline_ms", &Options::deadline_ms, 1, kMostMs},
    {"first_deadline_ms", &Options::first_deadline_ms, 1, kMostMs},
    {"chunk_bytes", &Options::chunk_bytes, 1, kMostBytes},
    {"eager_bytes", &Options::eager_bytes, 0, kMostBytes},
    {"slot_bytes", &Options::slot_bytes, 4096, kMostBytes},
}};

std::string Names() {
  std::string names;
  for (const Option& option : kOptions) names += StrCat(names.empty() ? "" : ", ", option.name);
  return names;
}

}  // namespace

Options ParseOptions(const std::map<std::string, int64_t>& values) {
  Options options;
  for (const auto& [name, value] : values) {
    const auto* found = std::ranges::find(kOptions, name, &Option::name);
    if (found == kOptions.end()) {
      Throw(ErrorCode::kUsage, "no engine option is called '", name, "'; there are ", Names());
    }
    if (value < found->least || value > found->most) {
      Throw(ErrorCode::kUsage, name, " is ", value, ", but must be ", found->least, " to ",
            found->most);
    }
    options.*found->member = value;
  }
  return options;
}

}  // namespace jaxhet
