#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "xla_plugin/base/exit_code.h"
#include "xla_plugin/device/device.h"
#include "xla_plugin/engine/engine.h"
#include "xla_plugin/ffi/handlers.h"
#include "xla_plugin/net/seal.h"
#include "xla_plugin/net/verbs/nics.h"
#include "xla_plugin/transport/relay.h"

namespace nb = nanobind;

// jaxhet/_engine.pyi describes the functions. Errors reach Python as RuntimeError with the text
// "jaxhet.<Class>: ..."; _ffi.py turns them into the classes.
namespace jaxhet {
namespace {

using std::chrono::milliseconds;
using ErrorTuple = std::optional<std::pair<std::string, std::string>>;

ErrorTuple ToTuple(const std::shared_ptr<const Error>& error) {
  if (!error) return std::nullopt;
  return std::pair{std::string(error->name()), std::string(error->what())};
}

std::shared_ptr<Engine> MakeEngine(int64_t session, int process, int num_processes,
                                   const std::map<std::string, OptionValue>& options) {
  auto engine = std::make_shared<Engine>(process, num_processes, ParseOptions(options));
  RegisterEngine(session, engine);
  return engine;
}

// Whether the interpreter's exit hooks have run. Needs no lock of the interpreter.
bool IsFinalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

using HexKeys = std::pair<std::string, std::string>;  // to send, to receive

std::vector<SealKeys> ParseKeys(const std::vector<HexKeys>& hex) {
  std::vector<SealKeys> keys;
  for (const auto& [send, receive] : hex) {
    keys.push_back({.send = SealKey::FromHex(send), .receive = SealKey::FromHex(receive)});
  }
  return keys;
}

// `timeout_ms`: of a peer that joins a running engine.
void AddPeer(Engine& engine, int process, std::string description, int control_fd,
             const std::vector<int>& data_fds, bool same_host, std::vector<std::string> transports,
             std::vector<std::string> device_transports, std::map<std::string, std::string> refused,
             const std::vector<HexKeys>& keys, std::optional<int64_t> timeout_ms) {
  PeerSpec spec{.process = process,
                .description = std::move(description),
                .control = Fd(control_fd),
                .data = {},
                .same_host = same_host,
                .transports = std::move(transports),
                .device_transports = std::move(device_transports),
                .refused = std::move(refused),
                .keys = ParseKeys(keys)};
  for (const int fd : data_fds) spec.data.emplace_back(fd);
  if (!timeout_ms) return engine.AddPeer(std::move(spec));
  const nb::gil_scoped_release released;
  engine.JoinPeer(std::move(spec), milliseconds(*timeout_ms));
}

using SocketsTuple = std::tuple<int, int, size_t, std::vector<int>, std::vector<HexKeys>>;

std::vector<ChannelSockets> ToSockets(const std::vector<SocketsTuple>& tuples) {
  std::vector<ChannelSockets> sockets;
  for (const auto& [rank, peer_rank, num_lanes, fds, keys] : tuples) {
    auto& entry =
        sockets.emplace_back(ChannelSockets{rank, peer_rank, num_lanes, {}, ParseKeys(keys)});
    for (const int fd : fds) entry.sockets.emplace_back(fd);
  }
  return sockets;
}

std::vector<ChannelPair> ToPairs(const std::vector<std::pair<int, int>>& tuples) {
  std::vector<ChannelPair> pairs;
  for (const auto& [rank, peer_rank] : tuples) pairs.push_back({rank, peer_rank});
  return pairs;
}

void SetRanks(Engine& engine,
              const std::vector<std::tuple<int64_t, int, int, std::string>>& ranks) {
  std::vector<RankInfo> infos;
  for (const auto& [device_id, process, island, vendor] : ranks) {
    infos.push_back({device_id, process, island, vendor});
  }
  engine.SetRanks(std::move(infos));
}

using PlannedTuple = std::tuple<int64_t, std::vector<int64_t>, int64_t, int64_t, bool, int64_t,
                                int64_t, bool, int64_t>;

void RegisterPlan(Engine& engine, int64_t fingerprint, std::string text, std::string program,
                  const std::vector<PlannedTuple>& exchanges) {
  std::vector<PlannedExchange> planned;
  for (const auto& [kind, ranks, group_size, deadline_ms, skips_own, part_bytes, handle, is_finish,
                    handle_bytes] : exchanges) {
    planned.push_back({static_cast<ExchangeKind>(kind), ranks, group_size, deadline_ms, skips_own,
                       part_bytes, handle, is_finish, handle_bytes});
  }
  engine.AddPlan(fingerprint, std::move(text), std::move(program), planned);
}

// Between host memories, then between devices.
std::vector<PeerCounts> CountsOf(const Engine& engine) {
  auto counts =
      engine.Read([](const ProgressEngine& progress) { return progress.peers().Counts(); });
  const auto devices = engine.FindDevices();
  if (devices) std::ranges::move(devices->Counts(), std::back_inserter(counts));
  return counts;
}

// Chosen transport between CPUs; refused ones with the reasons, also between devices.
std::pair<std::string, std::vector<std::pair<std::string, std::string>>> TransportOf(
    const Engine& engine, int process) {
  const std::string chosen = engine.Read([&](const ProgressEngine& progress) {
    return progress.peers().Of(process).counts.transport;
  });
  std::vector<std::pair<std::string, std::string>> refused;
  for (const PeerCounts& counts : CountsOf(engine)) {
    if (counts.process != process) continue;
    for (const auto& [transport, reason] : counts.refusals) {
      const std::pair refusal(transport, reason);
      const bool is_known = std::ranges::count(refused, refusal) > 0;
      if (transport != "local" && !is_known) refused.push_back(refusal);
    }
  }
  return {chosen, refused};
}

int64_t ToUs(Clock::duration time) {
  return std::chrono::duration_cast<std::chrono::microseconds>(time).count();
}

nb::dict ToDict(const FlightRecord& record, const Plans& plans) {
  constexpr std::array kStates = {"started", "completed", "failed"};
  nb::dict dict;
  dict["rank"] = record.rank;
  dict["kind"] = kExchangeKinds.at(static_cast<size_t>(record.kind)).first.data();
  dict["plan"] = record.plan;
  dict["index"] = record.index;
  dict["run"] = record.run;
  dict["sequence"] = record.sequence;
  dict["bytes"] = record.operand_bytes;
  dict["group"] = record.group;
  dict["state"] = kStates.at(static_cast<size_t>(record.state));
  dict["started_us"] = ToUs(record.started.time_since_epoch());
  dict["ended_us"] = ToUs(record.ended.time_since_epoch());
  dict["exchange"] = plans.Describe(record.plan, record.index);
  return dict;
}

nb::list FlightRecords(const Engine& engine) {
  const auto [records, plans] = [&] {
    const nb::gil_scoped_release released;
    return engine.Read([&](const ProgressEngine& progress) {
      const auto devices = engine.FindDevices();
      auto all = devices ? devices->FlightRecords() : std::vector<FlightRecord>();
      std::ranges::copy(progress.flight_recorder().records(), std::back_inserter(all));
      return std::pair{std::move(all), progress.peers().plans()};
    });
  }();
  nb::list list;
  for (const FlightRecord& record : records) list.append(ToDict(record, plans));
  return list;
}

nb::dict ToDict(const DeviceInfo& info) {
  nb::dict dict;
  dict["ordinal"] = info.ordinal;
  dict["name"] = info.name;
  dict["model"] = info.model;
  dict["pci"] = info.pci_bus_id;
  dict["driver_version"] = info.driver_version;
  dict["stream_values"] = info.stream_values;
  dict["dma_buf"] = info.dma_buf;
  dict["gpu_direct_rdma"] = info.gpu_direct_rdma;
  return dict;
}

// A tuple for each vendor: name, devices, and why they can't be used, or "".
nb::list ListVendors() {
  nb::list list;
  for (const Vendor& vendor : Vendors()) {
    std::vector<DeviceInfo> infos;
    std::string reason;
    try {
      const nb::gil_scoped_release released;
      infos = vendor.list(vendor.libraries);
    } catch (const Error& error) {
      reason = error.text();
    }
    nb::list devices;
    for (const DeviceInfo& info : infos) devices.append(ToDict(info));
    list.append(nb::make_tuple(vendor.name.data(), devices, reason));
  }
  return list;
}

nb::dict ToDict(const verbs::NicInfo& info) {
  using Number = std::optional<int>;
  const bool has_gid = !info.is_infiniband && !info.reason.empty();
  nb::dict dict;
  dict["device"] = info.device;
  dict["port"] = info.port;
  dict["mtu"] = info.mtu > 0 ? Number(128 << info.mtu) : std::nullopt;  // enum ibv_mtu
  dict["gid_index"] = has_gid ? Number(info.gid.index) : std::nullopt;
  dict["reason"] = info.reason;
  dict["problem"] = info.problem;
  return dict;
}

// Every port, as the verbs transport with these options sees it.
nb::list ListNics(const std::map<std::string, OptionValue>& options) {
  const auto infos = [&] {
    const nb::gil_scoped_release released;
    return verbs::DescribeNics(ParseOptions(options).verbs);
  }();
  nb::list list;
  for (const verbs::NicInfo& info : infos) list.append(ToDict(info));
  return list;
}

nb::dict Handlers() {
  const auto capsule = [](XLA_FFI_Handler* handler) {
    return nb::capsule(reinterpret_cast<void*>(handler));
  };
  nb::dict cpu;
  cpu["jaxhet_exchange"] = capsule(&JaxhetExchange);
  nb::dict gpu;
  gpu["jaxhet_start"] = capsule(&JaxhetStart);
  gpu["jaxhet_done"] = capsule(&JaxhetDone);
  gpu["jaxhet_part"] = capsule(&JaxhetPart);
  nb::dict handlers;
  handlers["cpu"] = cpu;
  handlers["gpu"] = gpu;
  return handlers;
}

std::map<std::string, uint64_t> Stats(const Engine& engine) {
  auto stats = engine.Read([](const ProgressEngine& progress) { return progress.Stats(); });
  const auto devices = engine.FindDevices();
  if (!devices) return stats;
  for (const auto& [name, value] : devices->Stats()) stats[name] += value;
  return stats;
}

nb::list PeerStats(const Engine& engine) {
  const std::vector<PeerCounts> counts = [&] {
    const nb::gil_scoped_release released;
    return CountsOf(engine);
  }();
  nb::list list;
  for (const PeerCounts& count : counts) {
    nb::dict dict;
    dict["process"] = count.process;
    dict["transport"] = count.transport;
    dict["bytes_sent"] = count.bytes_sent;
    dict["bytes_received"] = count.bytes_received;
    dict["waited_us"] = ToUs(count.waited);
    dict["path_failures"] = count.path_failures;
    list.append(dict);
  }
  return list;
}

}  // namespace
}  // namespace jaxhet

NB_MODULE(_engine, m) {
  nb::set_leak_warnings(false);  // exceptions of a failed program hold what they have met
  using jaxhet::Engine;
  using jaxhet::milliseconds;
  using Released = nb::call_guard<nb::gil_scoped_release>;

  nb::class_<Engine>(m, "Engine")
      .def(nb::new_(&jaxhet::MakeEngine), nb::arg("session"), nb::arg("process"),
           nb::arg("num_processes"), nb::arg("options"))
      .def("add_peer", &jaxhet::AddPeer, nb::arg("process"), nb::arg("description"),
           nb::arg("control_fd"), nb::arg("data_fds"), nb::arg("same_host"), nb::arg("transports"),
           nb::arg("device_transports"), nb::arg("refused"), nb::arg("keys"),
           nb::arg("timeout_ms") = nb::none())
      .def(
          "start",
          [](Engine& engine, int64_t timeout_ms) { engine.Connect(milliseconds(timeout_ms)); },
          nb::arg("timeout_ms"), Released())
      .def("set_ranks", &jaxhet::SetRanks, nb::arg("ranks"), Released())
      .def("register_plan", &jaxhet::RegisterPlan, nb::arg("fingerprint"), nb::arg("text"),
           nb::arg("program"), nb::arg("exchanges"), Released())
      .def(
          "wait_failure",
          [](const Engine& engine, int64_t timeout_ms) {
            return jaxhet::ToTuple(engine.WaitFailure(milliseconds(timeout_ms)));
          },
          nb::arg("timeout_ms"), Released())
      .def("error", [](const Engine& engine) { return jaxhet::ToTuple(engine.failure()); })
      .def(
          "fail",
          [](Engine& engine, const std::string& code, const std::string& text) {
            engine.Fail(jaxhet::Error(jaxhet::ErrorCodeOf(code), text));
          },
          nb::arg("code"), nb::arg("text"), Released())
      .def(
          "open_devices",
          [](Engine& engine, const std::string& vendor,
             const std::vector<std::tuple<int, int, uintptr_t, size_t>>& devices,
             const std::vector<jaxhet::SocketsTuple>& sockets, int64_t timeout_ms,
             const std::vector<std::pair<int, int>>& later) {
            std::vector<jaxhet::OwnDevice> own;
            for (const auto& [rank, ordinal, address, num_bytes] : devices) {
              own.push_back({rank, ordinal, {reinterpret_cast<std::byte*>(address), num_bytes}});
            }
            engine.OpenDevices(jaxhet::VendorOf(vendor), own, jaxhet::ToSockets(sockets),
                               milliseconds(timeout_ms), jaxhet::ToPairs(later));
          },
          nb::arg("vendor"), nb::arg("devices"), nb::arg("sockets"), nb::arg("timeout_ms"),
          nb::arg("later"), Released())
      .def(
          "open_channels",
          [](Engine& engine, const std::vector<std::pair<int, int>>& pairs,
             const std::vector<jaxhet::SocketsTuple>& sockets, int64_t timeout_ms) {
            engine.OpenChannels(jaxhet::ToPairs(pairs), jaxhet::ToSockets(sockets),
                                milliseconds(timeout_ms));
          },
          nb::arg("pairs"), nb::arg("sockets"), nb::arg("timeout_ms"), Released())
      .def("stats", &jaxhet::Stats, Released())
      .def("peer_stats", &jaxhet::PeerStats)
      .def("flight_record", &jaxhet::FlightRecords)
      .def("transport_of", &jaxhet::TransportOf, nb::arg("process"), Released())
      .def(
          "close",
          [](Engine& engine, int64_t timeout_ms) { engine.Close(milliseconds(timeout_ms)); },
          nb::arg("timeout_ms"), Released())
      .def("abandon_in_child", &Engine::AbandonInChild);

  m.def("handlers", &jaxhet::Handlers);

  m.def("vendors", &jaxhet::ListVendors);

  m.def(
      "libcrypto", [] { return std::string(jaxhet::Crypto(jaxhet::Encryption::kFull).version(0)); },
      Released());

  m.def("nics", &jaxhet::ListNics, nb::arg("options"));
  nb::class_<jaxhet::Relay>(m, "Relay")
      .def(nb::init<const std::string&, const std::string&>(), nb::arg("host"), nb::arg("port"))
      .def_prop_ro("port", &jaxhet::Relay::port)
      .def("close", &jaxhet::Relay::Close, Released());
  m.def("fail_exit", &jaxhet::FailExit, nb::arg("code"));
  m.def(
      "limit_finalization",
      [](double limit_s, std::string text, int code) {
        const auto limit = std::chrono::duration<double>(limit_s);
        jaxhet::LimitExit(&jaxhet::IsFinalizing, std::chrono::duration_cast<milliseconds>(limit),
                          std::move(text), code);
      },
      nb::arg("limit_s"), nb::arg("text"), nb::arg("code"));

  nb::dict kinds;
  for (const auto& [name, kind] : jaxhet::kExchangeKinds) {
    kinds[name.data()] = static_cast<int64_t>(kind);
  }
  m.attr("EXCHANGE_KINDS") = kinds;
  nb::list transports;
  for (const jaxhet::Transport& transport : jaxhet::Transports()) {
    transports.append(transport.name.data());
  }
  m.attr("TRANSPORTS") = transports;
  nb::list device_transports;
  for (const jaxhet::DeviceTransport& transport : jaxhet::DeviceTransports()) {
    device_transports.append(transport.name.data());
  }
  m.attr("DEVICE_TRANSPORTS") = device_transports;
  m.attr("PROOF_BYTES") = jaxhet::kProofBytes;
}
