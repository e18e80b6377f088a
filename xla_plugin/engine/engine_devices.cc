#include <algorithm>
#include <iterator>
#include <thread>

#include "xla_plugin/engine/engine.h"

// The engine's side of exchanges between devices.
namespace jaxhet {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kPlanTimeout{2'000};  // for a peer's plan that is on its way

}  // namespace

std::shared_ptr<DeviceEngine> Engine::FindDevices() const {
  const std::lock_guard lock(devices_mutex_);
  return devices_;
}

std::shared_ptr<DeviceEngine> Engine::devices() const {
  if (auto devices = FindDevices()) return devices;
  Throw(ErrorCode::kUsage, "the devices of this process are not open (jaxhet.initialize)");
}

void Engine::OpenDevices(std::string_view vendor, const std::vector<OwnDevice>& own,
                         std::vector<RingSockets> sockets, milliseconds timeout) {
  CheckUsable();
  const Vendor& its_vendor = VendorOf(vendor);
  std::vector<std::unique_ptr<DeviceRank>> ranks;
  RingOptions rings{.slot_bytes = static_cast<size_t>(options_.slot_bytes),
                    .pull_bytes = static_cast<size_t>(options_.eager_bytes) + 1,
                    .operands = {},
                    .verbs = options_.verbs,
                    .encryption = ParseEncryption(options_.encryption),
                    .least_severity = LeastSeverity(options_.log_level)};
  for (RingSockets& of_pair : sockets) {
    of_pair.keys = KeysFor(rings.encryption, of_pair.sockets.size(), std::move(of_pair.keys));
  }
  for (const auto& [rank, ordinal, operands] : own) {
    rings.operands[rank] = operands;
    auto device = its_vendor.open(its_vendor.libraries, ordinal);
    if (!device->info().stream_values) {
      Throw(ErrorCode::kDevice, device->info().ToString(), " can't wait for values on its streams");
    }
    ranks.push_back(std::make_unique<DeviceRank>(rank, std::move(device),
                                                 static_cast<size_t>(options_.eager_bytes)));
  }
  ConnectRings(ranks, sockets, rings, Clock::now() + timeout);
  JobView& job = *this;
  const auto devices = std::make_shared<DeviceEngine>(job, options_, std::move(ranks));
  std::ranges::copy(devices->SocketFds(), std::back_inserter(inherited_fds_));
  {
    const std::lock_guard lock(devices_mutex_);
    devices_ = devices;
  }
  Complete(Submit([devices = devices.get()](Core& core) { core.SetDevices(devices); }));
}

std::map<std::string, uint64_t> Engine::DeviceStats() const {
  const auto devices = FindDevices();
  return devices ? devices->Stats() : std::map<std::string, uint64_t>();
}

std::vector<DeviceRank::RingBytes> Engine::DeviceBytes() const {
  const auto devices = FindDevices();
  return devices ? devices->Bytes() : std::vector<DeviceRank::RingBytes>();
}

std::vector<FlightRecord> Engine::DeviceFlightRecords() const {
  const auto devices = FindDevices();
  return devices ? devices->FlightRecords() : std::vector<FlightRecord>();
}

void Engine::ConnectRings(std::span<const std::unique_ptr<DeviceRank>> ranks,
                          std::span<RingSockets> sockets, const RingOptions& options,
                          Time deadline) {
  {
    // SetRanks() may have been left to the progress thread.
    const std::lock_guard lock(monitor_);
    if (!core_) ThrowClosed();
    RunCommands();
  }
  Wake();
  const auto peers = Read([](const Core& core) {
    std::vector<RingPeer> found;
    const Roster& roster = core.roster();
    for (int rank = 0; rank < roster.num_ranks(); ++rank) {
      const Peer& peer = core.PeerOf(rank);
      found.push_back({.rank = rank,
                       .process = peer.process,
                       .name = roster.RankAndProcess(rank),
                       .vendor = roster.Info(rank).vendor,
                       .same_process = peer.process == roster.process(),
                       .same_host = peer.same_host,
                       .allowed = peer.ring_transports});
    }
    return found;
  });
  const RingMail mail{.send =
                          [this](int process, std::span<const iovec> body) {
                            std::string text;
                            for (const iovec& piece : body) {
                              text.append(static_cast<const char*>(piece.iov_base), piece.iov_len);
                            }
                            Complete(Submit([process, text = std::move(text)](Core& core) {
                              const iovec whole = ToIovec(text.data(), text.size());
                              core.SendRing(process, {&whole, 1});
                            }));
                          },
                      .receive =
                          [this] {
                            const std::lock_guard lock(monitor_);
                            if (!core_) ThrowClosed();
                            return core_->TakeRingMessages();
                          },
                      .check =
                          [this] {
                            if (const auto cause = failure()) throw Error(*cause);
                          }};
  SetUpRings(peers, ranks, sockets, options, mail, deadline);
}

void Engine::CloseDevices(milliseconds timeout) {
  const auto devices = FindDevices();
  if (!devices) return;
  if (!failure() && !devices->WaitIdle(timeout) && !failure()) {
    Fail(Error(ErrorCode::kUsage,
               "exchanges between devices were still under way when this process left the job. "
               "Wait for the results before jaxhet.shutdown()."));
  }
  if (failure()) devices->Abandon();
}

void Engine::Lose(int peer_rank, std::string_view why) {
  try {
    Complete(
        Submit([peer_rank, why = std::string(why)](Core& core) { core.Lose(peer_rank, why); }));
  } catch (const Error&) {
    if (!closed_) throw;
  }
}

bool Engine::HasLeft(int rank) {
  return Read([&](const Core& core) { return core.PeerOf(rank).left; });
}

std::string Engine::Describe(int64_t plan, int64_t index) {
  return Read([&](const Core& core) { return core.plans().Describe(plan, index); });
}

Error Engine::MismatchError(int rank, const DeviceRank::Mismatch& mismatch) {
  const Time limit = Clock::now() + kPlanTimeout;
  const auto& [peer_rank, own, theirs] = mismatch;
  while (Clock::now() < limit) {
    const auto error = Read([&](const Core& core) -> std::optional<Error> {
      const int process = core.roster().ProcessOf(peer_rank);
      if (core.PlansOf(process).Find(theirs.plan) == nullptr) return std::nullopt;
      if (own.plan != theirs.plan) return core.PlanMismatch(rank, own.plan, peer_rank, theirs.plan);
      return Error(
          ErrorCode::kPlanMismatch,
          StrCat(core.Where(rank, own.plan, own.index), core.roster().RankAndProcess(peer_rank),
                 " is at ", core.PlansOf(process).Describe(theirs.plan, theirs.index), " (",
                 theirs.num_bytes, " bytes, here ", own.num_bytes,
                 "). Make the program's branches depend on values that are equal on all "
                 "ranks."),
          process);
    });
    if (error) return *error;
    std::this_thread::sleep_for(milliseconds(1));
  }
  return Read([&](const Core& core) {
    return Error(
        ErrorCode::kPlanMismatch,
        StrCat(core.Where(rank, own.plan, own.index), core.roster().RankAndProcess(peer_rank),
               " runs another program, whose plan it has not sent. Run the same program "
               "on all ranks in the same order."),
        core.roster().ProcessOf(peer_rank));
  });
}

Error Engine::LateError(int rank, const DeviceRank::Report::Late& late) {
  return Read([&](const Core& core) {
    const Roster& roster = core.roster();
    const int process = roster.ProcessOf(late.peer_rank);
    std::string text =
        StrCat(core.Where(rank, late.plan, late.index), roster.RankAndProcess(late.peer_rank));
    if (late.has_launched) {
      text += StrCat(" is too slow: its device has not come to it within ", late.waited.count(),
                     " ms. ");
    } else {
      text += StrCat(" has not started it within ", late.waited.count(), " ms; ");
      text += late.last
                  ? StrCat("it last started ",
                           core.PlansOf(process).Describe(late.last->plan, late.last->index), ". ")
                  : "it has started none so far. ";
    }
    text +=
        "The process answers, so its program went another way or is slower than the deadline; if "
        "the latter, raise the deadline.";
    return Error(ErrorCode::kDeadline, text, process);
  });
}

Error Engine::StartError(int rank, int64_t plan, int64_t index, const Error& cause) {
  return Read([&](const Core& core) {
    return Error(cause.code(), StrCat(core.Where(rank, plan, index), cause.text()),
                 core.roster().process());
  });
}

}  // namespace jaxhet
