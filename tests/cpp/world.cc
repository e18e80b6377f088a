#include "tests/cpp/world.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <thread>

#include "tests/cpp/testing.h"
#include "xla_plugin/base/error.h"

namespace jaxhet::testing {
namespace {

constexpr size_t kRow = 256;

Fd NewSocket() {
  Fd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int yes = 1;
  if (!fd || setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes) != 0) {
    ThrowErrno("socket");
  }
  return fd;
}

}  // namespace

std::pair<Fd, Fd> ConnectedPair(size_t path) {
  const Fd listener = NewSocket();
  sockaddr_in address{};
  address.sin_family = AF_INET;
  // A closed connection keeps its ports for a minute. Every process has an address of its own:
  // many tests at once, of 1,000 connections and more, do not use up the machine's ports. Process
  // ids have 22 bits at most.
  const auto own = static_cast<in_addr_t>(getpid()) | static_cast<in_addr_t>(path << 22);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK + own);
  socklen_t size = sizeof address;
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  if (bind(listener.get(), generic, size) != 0 || listen(listener.get(), 1) != 0 ||
      getsockname(listener.get(), generic, &size) != 0) {
    ThrowErrno("listen");
  }
  Fd first = NewSocket();
  if (connect(first.get(), generic, size) != 0) ThrowErrno("connect");
  Fd second(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  const int yes = 1;
  setsockopt(second.get(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
  return {std::move(first), std::move(second)};
}

std::vector<std::vector<Ends>> ConnectAll(int num_processes, int num_data, size_t num_paths) {
  const auto count = static_cast<size_t>(num_processes);
  std::vector<std::vector<Ends>> ends(count);
  for (auto& row : ends) row.resize(count);
  for (size_t a = 0; a < count; ++a) {
    for (size_t b = a + 1; b < count; ++b) {
      std::tie(ends[a][b].control, ends[b][a].control) = ConnectedPair();
      for (int i = 0; i < num_data; ++i) {
        auto [first, second] = ConnectedPair(static_cast<size_t>(i) % num_paths);
        ends[a][b].data.push_back(std::move(first));
        ends[b][a].data.push_back(std::move(second));
      }
    }
  }
  return ends;
}

verbs::Options NicOptions(int64_t depth) {
  return {.devices = {},
          .gid_index = -1,
          .pkey_index = 0,
          .qps = 2,
          .depth = depth,
          .traffic_class = 0,
          .service_level = 0,
          .timeout = 18,
          .retries = 7};
}

Options EngineOptions() {
  return {.heartbeat_ms = 50,
          .peer_timeout_ms = 5'000,
          .deadline_ms = 20'000,
          .first_deadline_ms = 20'000,
          .chunk_bytes = 64 << 10,
          .eager_bytes = 1 << 10,
          .slot_bytes = 16 << 20,
          .encryption = "off",
          .log_level = "info",
          .verbs = NicOptions()};
}

WorldOptions FaultOptions(const std::string& transport) {
  WorldOptions options{.transports = {transport}};
  options.engine.peer_timeout_ms = kFaultTimeoutMs;
  return options;
}

std::vector<RankInfo> RanksOf(const WorldOptions& options) {
  std::vector<RankInfo> ranks;
  for (int rank = 0; rank < options.num_processes * options.ranks_per_process; ++rank) {
    const int process = rank / options.ranks_per_process;
    ranks.push_back({.device_id = 100 + rank,
                     .process = process,
                     .island = process,
                     .vendor = options.has_two_vendors && rank == 1 ? "other" : "cpu"});
  }
  return ranks;
}

std::vector<SealKeys> TestKeys(int own, int peer, size_t num_connections) {
  const auto key = [](int from, int to, size_t connection) {
    const std::string text = StrCat(from, "0", to, "0", connection);
    return SealKey::FromHex(std::string(2 * SealKey::kNumBytes - text.size(), 'f') + text);
  };
  std::vector<SealKeys> keys;
  for (size_t i = 0; i < num_connections; ++i) {
    keys.push_back({.send = key(own, peer, i), .receive = key(peer, own, i)});
  }
  return keys;
}

PeerSpec SpecOf(int peer, const WorldOptions& options, Ends ends) {
  return {.process = peer,
          .description = StrCat("host ", peer),
          .control = std::move(ends.control),
          .data = std::move(ends.data),
          .same_host = true,
          .transports = options.moves_host_memory ? options.transports : std::vector<std::string>(),
          .device_transports = options.transports,
          .refused = {},
          .keys = {}};
}

std::unique_ptr<Engine> MakeEngine(int process, const WorldOptions& options,
                                   std::vector<Ends> ends) {
  auto engine = std::make_unique<Engine>(process, options.num_processes, options.engine);
  for (int peer = 0; peer < options.num_processes; ++peer) {
    if (peer == process) continue;
    PeerSpec spec = SpecOf(peer, options, std::move(ends[static_cast<size_t>(peer)]));
    spec.keys = TestKeys(process, peer, 1 + spec.data.size());
    engine->AddPeer(std::move(spec));
  }
  return engine;
}

std::string PlanText(int num_lines, std::string_view changed_line) {
  std::string text;
  for (int line = 0; line < num_lines; ++line) {
    const bool is_last = line + 1 == num_lines;
    text += is_last && !changed_line.empty() ? std::string(changed_line) : StrCat("line ", line);
    text += StrCat("\top ", line, "\n");
  }
  return text;
}

std::set<Pollable*> JoinPeer(ProgressEngine& progress, PeerSpec spec) {
  Newcomers newcomers;
  progress.Invite(std::move(spec), newcomers);
  Negotiate(progress.peers().roster().process(), newcomers.introductions, Clock::now() + kLong);
  return progress.Admit(newcomers);
}

void SetUpEngine(Engine& engine, const WorldOptions& options) {
  engine.Connect(kLong);
  engine.SetRanks(RanksOf(options));
  engine.AddPlan(kPlan, PlanText(8));
}

World::World(WorldOptions options, std::vector<std::vector<Ends>> ends)
    : options_(std::move(options)) {
  if (ends.empty()) ends = ConnectAll(options_.num_processes);
  std::vector<std::thread> threads;
  for (int process = 0; process < options_.num_processes; ++process) {
    engines_.push_back(
        MakeEngine(process, options_, std::move(ends[static_cast<size_t>(process)])));
    threads.emplace_back([&, engine = engines_.back().get()] { SetUpEngine(*engine, options_); });
  }
  for (std::thread& thread : threads) thread.join();
}

World::~World() { CloseAll(); }

void World::CloseAll() {
  std::vector<std::thread> threads;
  for (const auto& engine : engines_) {
    threads.emplace_back([&] { engine->Close(kLong); });
  }
  for (std::thread& thread : threads) thread.join();
}

ForkedPeer::ForkedPeer(const WorldOptions& options, const Script& script) {
  auto ends = ConnectAll(2);
  pid_ = StartChild([&] {
    ends[0].clear();
    const auto engine = MakeEngine(1, options, std::move(ends[1]));
    SetUpEngine(*engine, options);
    return script(*engine);
  });
  ends[1].clear();
  engine_ = MakeEngine(0, options, std::move(ends[0]));
}

ForkedPeer::~ForkedPeer() {
  if (pid_ > 0) Kill(SIGKILL);
  if (pid_ > 0) ExitCode();
  engine_->Close(std::chrono::milliseconds(100));
}

void ForkedPeer::Kill(int signal) const { kill(pid_, signal); }

int ForkedPeer::ExitCode() { return WaitForChild(std::exchange(pid_, 0)); }

int WaitForEver(Engine& /*engine*/) {
  while (true) pause();
}

Call::Call(ExchangeRequest request, const std::vector<size_t>& operand_bytes,
           const std::vector<size_t>& result_bytes)
    : request_(std::move(request)) {
  for (size_t i = 0; i < operand_bytes.size(); ++i) {
    operands.push_back(Pattern(request_.rank, i, operand_bytes[i]));
  }
  for (const size_t num_bytes : result_bytes) results.emplace_back(num_bytes, std::byte{0xEE});
}

void Call::StartOn(Engine& engine) {
  for (const auto& operand : operands) request_.operands.emplace_back(operand);
  for (auto& result : results) request_.results.emplace_back(result);
  request_.done = [this](const Error* error) {
    promise_.set_value(error == nullptr ? std::nullopt : std::optional(*error));
  };
  engine.Start(std::move(request_));
}

std::optional<Error> Call::Wait() { return promise_.get_future().get(); }

ExchangeRequest GatherRequest(int rank, int64_t run_id) {
  ExchangeRequest request;
  request.rank = rank;
  request.run_id = run_id;
  request.plan = kPlan;
  request.group = {0, 1};
  return request;
}

StartInfo GatherStart(uint64_t num_bytes, uint64_t eager) {
  return {.communicator = CommunicatorId(std::array{0, 1}),
          .run = 1,
          .plan = kPlan,
          .index = 0,
          .sequence = 0,
          .kind = static_cast<int64_t>(ExchangeKind::kAllGather),
          .source = 1,
          .destination = 0,
          .send_bytes = num_bytes,
          .receive_bytes = num_bytes,
          .ticket = 1,
          .eager = eager};
}

std::optional<Error> Gather(Engine& engine, int rank, size_t num_bytes, int64_t run_id) {
  Call call(GatherRequest(rank, run_id), {num_bytes}, {2 * num_bytes});
  call.StartOn(engine);
  return call.Wait();
}

std::array<std::optional<Error>, 2> GatherBoth(World& world, size_t num_bytes, int64_t run_id,
                                               const std::function<void()>& meanwhile) {
  std::deque<Call> calls;
  for (const int rank : {0, 1}) {
    calls.emplace_back(GatherRequest(rank, run_id), std::vector{num_bytes},
                       std::vector{2 * num_bytes});
    calls.back().StartOn(world.EngineOf(rank));
  }
  if (meanwhile) meanwhile();
  std::array errors = {calls[0].Wait(), calls[1].Wait()};
  std::vector<std::byte> right = Pattern(0, 0, num_bytes);
  const std::vector<std::byte> second = Pattern(1, 0, num_bytes);
  right.insert(right.end(), second.begin(), second.end());
  for (const size_t rank : {0U, 1U}) {
    if (errors.at(rank) || AreEqual(calls[rank].results[0], right)) continue;
    errors.at(rank) = Error(ErrorCode::kUsage, kWrongBytes);
  }
  return errors;
}

// Byte i is i * 131 + i / 256 + seed: rows of 256 bytes, of which there are 256.
std::vector<std::byte> Pattern(int rank, size_t operand, size_t num_bytes, size_t begin) {
  static const std::vector<std::byte> rows = [] {
    std::vector<std::byte> bytes(kRow * kRow);
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = std::byte((i * 131 + i / kRow) & 0xff);
    return bytes;
  }();
  const size_t seed = static_cast<size_t>(rank) * 31 + operand * 7 + 1;
  std::vector<std::byte> pattern(num_bytes);
  for (size_t done = 0; done < num_bytes;) {
    const size_t at = (begin + done + seed * kRow) % rows.size();
    const size_t part = std::min(num_bytes - done, rows.size() - at);
    std::memcpy(pattern.data() + done, rows.data() + at, part);
    done += part;
  }
  return pattern;
}

bool AreEqual(std::span<const std::byte> a, std::span<const std::byte> b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size()) == 0);
}

}  // namespace jaxhet::testing
