#include <algorithm>
#include <set>

#include "xla_plugin/engine/engine.h"

// The engine's side of exchanges between devices.
namespace jaxhet {
namespace {

using std::chrono::milliseconds;

std::vector<ChannelPair> PairsButFor(std::span<const OwnDevice> own,
                                     const std::vector<ChannelPair>& later, int num_ranks) {
  std::vector<ChannelPair> pairs;
  for (const OwnDevice& device : own) {
    for (int peer_rank = 0; peer_rank < num_ranks; ++peer_rank) {
      const ChannelPair pair{device.rank, peer_rank};
      if (peer_rank != device.rank && std::ranges::count(later, pair) == 0) pairs.push_back(pair);
    }
  }
  return pairs;
}

}  // namespace

std::shared_ptr<DeviceEngine> Engine::FindDevices() const {
  const std::lock_guard lock(devices_mutex_);
  return devices_;
}

std::shared_ptr<DeviceEngine> Engine::devices() const {
  if (auto devices = FindDevices()) return devices;
  Throw(ErrorCode::kUsage, "the devices of this process are not open (jaxhet.initialize)");
}

void Engine::OpenDevices(const Vendor& vendor, const std::vector<OwnDevice>& own,
                         std::vector<ChannelSockets> sockets, milliseconds timeout,
                         const std::vector<ChannelPair>& later) {
  CheckUsable();
  std::vector<std::unique_ptr<DeviceRank>> ranks;
  verbs::Nics nics(options_.verbs);
  ChannelOptions channels{.engine = options_, .operands = {}, .nics = &nics};
  for (const auto& [rank, ordinal, operands] : own) {
    channels.operands[rank] = operands;
    auto device = vendor.open(vendor.libraries, ordinal);
    if (!device->info().stream_values) {
      Throw(ErrorCode::kDevice, device->info().ToString(), " can't wait for values on its streams");
    }
    ranks.push_back(std::make_unique<DeviceRank>(rank, std::move(device),
                                                 static_cast<size_t>(options_.eager_bytes)));
  }
  const int num_ranks = [&] {
    const std::lock_guard lock(inbox_mutex_);
    return static_cast<int>(device_ids_.size());
  }();
  const bool uses_nics = Read([](const ProgressEngine& progress) {
    return std::ranges::any_of(progress.peers().all(), [](const auto& entry) {
      return std::ranges::count(entry.second.device_transports, "verbs") > 0;
    });
  });
  MakeArenas(ranks, later, num_ranks, uses_nics, channels);
  ConnectChannels(ranks, PairsButFor(own, later, num_ranks), sockets, channels,
                  Clock::now() + timeout);
  JobView& job = *this;
  const auto devices = std::make_shared<DeviceEngine>(job, options_, std::move(ranks));
  {
    const std::lock_guard lock(devices_mutex_);
    devices_ = devices;
  }
  Complete(Submit(
      [devices = devices.get()](ProgressEngine& progress) { progress.SetDevices(devices); }));
}

void Engine::OpenChannels(const std::vector<ChannelPair>& pairs,
                          std::vector<ChannelSockets> sockets, milliseconds timeout) {
  const auto opened = devices();
  verbs::Nics nics(options_.verbs);  // the arena has its own
  ConnectChannels(opened->ranks(), pairs, sockets,
                  {.engine = options_, .operands = {}, .nics = &nics}, Clock::now() + timeout);
}

void Engine::ConnectChannels(std::span<const std::unique_ptr<DeviceRank>> ranks,
                             std::span<const ChannelPair> pairs, std::span<ChannelSockets> sockets,
                             const ChannelOptions& options, Time deadline) {
  {
    // SetRanks() or a peer may have been left to the progress thread.
    const std::lock_guard lock(monitor_);
    if (!progress_) ThrowClosed();
    RunCommands();
  }
  Wake();
  for (ChannelSockets& of_pair : sockets) {
    of_pair.keys = KeysFor(ParseEncryption(options_.encryption), of_pair.sockets.size(),
                           std::move(of_pair.keys));
  }
  std::set<int> joined;
  for (const ChannelPair& pair : pairs) joined.insert({pair.rank, pair.peer_rank});
  const auto peers = Read([&](const ProgressEngine& progress) {
    std::vector<ChannelPeer> found;
    const Roster& roster = progress.peers().roster();
    for (const int rank : joined) {
      const Peer& peer = progress.peers().OfRank(rank);
      found.push_back({.rank = rank,
                       .process = peer.process,
                       .name = roster.RankAndProcess(rank),
                       .vendor = roster.Info(rank).vendor,
                       .same_process = peer.process == roster.process(),
                       .same_host = peer.same_host,
                       .allowed = peer.device_transports});
    }
    return found;
  });
  SetUpChannels(peers, ranks, pairs, sockets, options, *this, deadline);
}

void Engine::SendChannelMessage(int process, std::string body) {
  Complete(Submit([process, body = std::move(body)](ProgressEngine& progress) {
    progress.SendChannelMessage(process, body);
  }));
}

std::vector<ChannelMessage> Engine::TakeChannelMessages(
    const std::function<bool(const ChannelMessage&)>& want) {
  const std::lock_guard lock(monitor_);
  if (!progress_) ThrowClosed();
  return progress_->TakeChannelMessages(want);
}

void Engine::CloseDevices(milliseconds timeout) {
  const auto devices = FindDevices();
  if (!devices) return;
  if (!failure() && !devices->WaitIdle(timeout) && !failure()) {
    Fail(DevicesUnderWayError());
  }
  if (failure()) devices->Abandon();
}

bool Engine::HasLeft(int rank) {
  return Read([&](const ProgressEngine& progress) { return progress.peers().OfRank(rank).left; });
}

RankFacts Engine::FactsOf(int rank, int64_t plan, int64_t index) {
  return Read(
      [&](const ProgressEngine& progress) { return progress.peers().FactsOf(rank, plan, index); });
}

}  // namespace jaxhet
