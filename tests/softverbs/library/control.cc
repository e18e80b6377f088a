#include "tests/softverbs/library/control.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "tests/cpp/host_device.h"
#include "tests/softverbs/library/nic.h"
#include "xla_plugin/base/error.h"
#include "xla_plugin/device/device.h"

namespace jaxhet::softverbs {
namespace {

uint64_t ToNumber(std::string_view text) {
  if (text == "all") return kAll;
  uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) {
    Throw(ErrorCode::kUsage, "'", text, "' is no number");
  }
  return number;
}

// The words of one command: a name, arguments, and options "key=value".
class Words {
 public:
  explicit Words(std::string_view text) {
    std::istringstream words{std::string(text)};
    for (std::string word; words >> word;) {
      const size_t equals = word.find('=');
      if (equals == std::string::npos) {
        plain_.push_back(word);
      } else {
        options_[word.substr(0, equals)] = word.substr(equals + 1);
      }
    }
  }

  bool empty() const { return plain_.empty() && options_.empty(); }
  const std::string& name() const { return Argument(0); }
  const std::string& Argument(size_t i) const {
    if (i >= plain_.size()) Throw(ErrorCode::kUsage, "an argument is missing");
    return plain_[i];
  }
  uint64_t Number(size_t i) const { return ToNumber(Argument(i)); }

  // Takes an option away.
  template <typename T>
  bool Take(const char* key, T& to) {
    const auto found = options_.find(key);
    if (found == options_.end()) return false;
    to = static_cast<T>(ToNumber(found->second));
    options_.erase(found);
    return true;
  }
  bool Take(const char* key, std::string& to) {
    const auto found = options_.find(key);
    if (found == options_.end()) return false;
    to = std::move(found->second);
    options_.erase(found);
    return true;
  }
  template <typename T>
  void Take(const char* key, std::optional<T>& to) {
    T value = 0;
    if (Take(key, value)) to = value;
  }
  void ExpectNoMore() const {
    if (!options_.empty()) Throw(ErrorCode::kUsage, "no option ", options_.begin()->first);
  }

 private:
  std::vector<std::string> plain_;
  std::map<std::string, std::string, std::less<>> options_;
};

constexpr std::array<std::pair<std::string_view, FaultKind>, 8> kFaults = {
    {{"error", FaultKind::kError},
     {"ghost", FaultKind::kGhost},
     {"delay", FaultKind::kDelay},
     {"flush", FaultKind::kFlush},
     {"peer_flush", FaultKind::kPeerFlush},
     {"lose", FaultKind::kLose},
     {"garble", FaultKind::kGarble},
     {"call", FaultKind::kCall}}};

Fault ToFault(FaultKind kind, Words& words) {
  Fault fault;
  fault.kind = kind;
  int64_t us = 0;
  std::string memory;
  words.Take("device", fault.device);
  words.Take("port", fault.port);
  words.Take("qpn", fault.qpn);
  words.Take("opcode", fault.opcode);
  words.Take("after", fault.after);
  words.Take("count", fault.count);
  words.Take("status", fault.status);
  words.Take("errno", fault.error_number);
  words.Take("bytes", fault.bytes);
  words.Take("us", us);
  words.Take("memory", memory);
  fault.delay = std::chrono::microseconds(us);
  fault.only_dmabuf = memory == "dmabuf";
  if (kind == FaultKind::kCall) fault.call = words.Argument(1);
  return fault;
}

DeviceModel& FindDevice(Nic& nic, const Words& words) {
  DeviceModel* const model = nic.fabric().Find(words.Argument(1));
  if (model == nullptr) Throw(ErrorCode::kUsage, "no device ", words.Argument(1));
  if (model->FindPort(static_cast<int>(words.Number(2))) == nullptr) {
    Throw(ErrorCode::kUsage, "no port ", words.Argument(2));
  }
  return *model;
}

void AddDevice(Nic& nic, Words& words) {
  DeviceSpec spec{.name = words.Argument(1)};
  std::string link;
  words.Take("ports", spec.ports);
  words.Take("mtu", spec.mtu);
  words.Take("link", link);
  spec.is_infiniband = link == "infiniband";
  nic.fabric().Add(spec);
}

void SetGid(Nic& nic, const Words& words) {
  DeviceModel& model = FindDevice(nic, words);
  const auto port = static_cast<int>(words.Number(2));
  const uint64_t index = words.Number(3);
  if (index >= model.FindPort(port)->gids.size()) Throw(ErrorCode::kUsage, "no such GID");
  nic.SetGid(model, port, static_cast<int>(index), words.Argument(4) == "add");
}

void BreakQp(Nic& nic, const Words& words) {
  if (!nic.BreakQp(static_cast<uint32_t>(words.Number(1)))) Throw(ErrorCode::kUsage, "no such QP");
}

void SetJitter(Nic& nic, Words& words) {
  uint32_t seed = 1;
  words.Take("seed", seed);
  nic.SetJitter(std::chrono::microseconds(words.Number(1)), seed);
}

// Knows the memory of a device, and the host's.
void CopyByDevice(Nic& nic, const Words& words) {
  static Device* device = nullptr;  // never closed: the driver may go first
  static const Stream* stream = nullptr;
  const Vendor& vendor = testing::TestVendorOf(words.Argument(1));
  device = vendor.open(vendor.libraries, 0).release();
  stream = new Stream(device->CreateStream(StreamPriority::kHigh));
  nic.memory().set_copy([](void* to, const void* from, size_t num_bytes) {
    device->Copy(stream->get(), to, from, num_bytes);
    device->Synchronize(stream->get());
  });
}

struct Verb {
  std::string_view name;
  void (*run)(Nic& nic, Words& words);
};

constexpr std::array kVerbs = {
    Verb{"device", AddDevice},
    Verb{"port",
         [](Nic& nic, Words& words) {
           DeviceModel& model = FindDevice(nic, words);
           nic.SetPort(model, static_cast<int>(words.Number(2)), words.Argument(3) == "up");
         }},
    Verb{"gid", [](Nic& nic, Words& words) { SetGid(nic, words); }},
    Verb{"break", [](Nic& nic, Words& words) { BreakQp(nic, words); }},
    Verb{"copy", [](Nic& nic, Words& words) { CopyByDevice(nic, words); }},
    Verb{"retry",
         [](Nic& nic, Words& words) {
           nic.set_retry_interval(std::chrono::microseconds(words.Number(1)));
         }},
    Verb{"jitter", SetJitter},
    Verb{"clear", [](Nic& nic, Words&) { nic.faults().Clear(); }},
    Verb{"release", [](Nic& nic, Words&) { nic.Release(); }},
};

void RunOne(Nic& nic, std::string_view text) {
  Words words(text);
  if (words.empty()) return;
  if (words.name() == "all") {
    const std::string_view rest = text.substr(text.find("all") + 3);
    nic.Broadcast(rest);
    return RunOne(nic, rest);
  }
  const auto* const verb = std::ranges::find(kVerbs, words.name(), &Verb::name);
  const auto* const fault =
      std::ranges::find(kFaults, words.name(), &decltype(kFaults)::value_type::first);
  if (verb != kVerbs.end()) {
    verb->run(nic, words);
  } else if (fault != kFaults.end()) {
    nic.faults().Add(ToFault(fault->second, words));
  } else {
    Throw(ErrorCode::kUsage, "no command ", words.name());
  }
  words.ExpectNoMore();
}

size_t Write(std::string_view from, char* text, size_t size) {
  if (size > 0) {
    const size_t length = std::min(from.size(), size - 1);
    std::memcpy(text, from.data(), length);
    text[length] = '\0';
  }
  return from.size();
}

}  // namespace

std::string Nic::Command(std::string_view text) {
  try {
    while (!text.empty()) {
      const size_t end = std::min(text.find(';'), text.size());
      RunOne(*this, text.substr(0, end));
      text.remove_prefix(std::min(end + 1, text.size()));
    }
  } catch (const Error& error) {
    return StrCat(error.text(), " (in '", text, "')");
  }
  return {};
}

}  // namespace jaxhet::softverbs

// NOLINTBEGIN(readability-identifier-naming,misc-use-internal-linkage)
using jaxhet::softverbs::Nic;

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int softverbs_command(const char* text, char* problem, size_t size) {
  Nic& nic = Nic::Get();
  const auto lock = nic.Lock();
  const std::string answer = nic.Command(text);
  nic.Wake();
  return jaxhet::softverbs::Write(answer, problem, size) == 0 ? 0 : 1;
}

EXPORT size_t softverbs_query(const char* what, char* text, size_t size) {
  Nic& nic = Nic::Get();
  const auto lock = nic.Lock();
  const std::string answer = nic.Describe(what);
  return jaxhet::softverbs::Write(answer, text, size);
}

EXPORT void softverbs_set_copy(void (*copy)(void* to, const void* from, size_t num_bytes)) {
  Nic& nic = Nic::Get();
  const auto lock = nic.Lock();
  nic.memory().set_copy(copy);
}
// NOLINTEND(readability-identifier-naming,misc-use-internal-linkage)
