#include "xla_plugin/engine/common/wire.h"

namespace jaxhet {

std::string_view TakeBytes(std::string_view& body, uint64_t num_bytes) {
  if (num_bytes > body.size()) Throw(ErrorCode::kTransport, "a message is cut");
  const std::string_view bytes = body.substr(0, num_bytes);
  body.remove_prefix(num_bytes);
  return bytes;
}

Error ParseFail(std::string_view body) {
  const auto info = TakeInfo<FailInfo>(body);
  if (static_cast<size_t>(info.code) >= kErrorNames.size()) {
    Throw(ErrorCode::kTransport, "a failure of an unknown kind is reported: ", body);
  }
  return {info.code, body, info.failed_process};
}

std::string PackStrings(std::span<const std::string> strings) {
  std::string packed;
  for (const std::string& string : strings) {
    const uint64_t num_bytes = string.size();
    packed.append(reinterpret_cast<const char*>(&num_bytes), sizeof num_bytes).append(string);
  }
  return packed;
}

std::vector<std::string> UnpackStrings(std::string_view body) {
  std::vector<std::string> strings;
  while (!body.empty()) {
    const auto num_bytes = TakeInfo<uint64_t>(body);
    strings.emplace_back(TakeBytes(body, num_bytes));
  }
  return strings;
}

}  // namespace jaxhet
