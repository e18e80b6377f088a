#include "xla_plugin/engine/device/channel_setup.h"

#include <sys/random.h>

#include <algorithm>
#include <mutex>
#include <set>
#include <thread>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/net/socket/socket_connection.h"
#include "xla_plugin/transport/device_channel/lane.h"

namespace jaxhet {
namespace {

// How far a source and a target are with their channel; a text follows.
enum class ChannelStep : int32_t {
  kOffer,     // target: an offer, which replaces the one before
  kAnswer,    // source: an answer; the channel is open
  kAccepted,  // target: a proof
  kProved,    // source: the proof lies in slot 0
  kRefused,   // source: the reason
  kSettled,   // target: the channel can be used
};

struct ChannelStepInfo {
  ChannelStep step;
  int32_t source;
  int32_t target;
  int32_t transport;  // place of an offer's in DeviceTransports()
};

// Message that an end of a channel waits for. Until nothing is awaited, a source may get another
// offer.
enum class Awaited { kOffer, kAnswer, kAccepted, kProof, kSettled, kNothing };

// An end of a channel at one of our ranks: the target's if it is incoming, else the source's.
struct ChannelEnd {
  DeviceRank* rank;
  const ChannelPeer* peer;
  bool is_incoming;
  Awaited awaited;
  // NOLINTBEGIN(readability-redundant-member-init): as in ExchangeRequest.
  std::unique_ptr<RankChannel> channel = {};
  // The target's:
  size_t next = 0;  // transport to try
  std::string proof = {};
  std::vector<Refusal> refusals = {};
  // NOLINTEND(readability-redundant-member-init)

  bool is_open() const { return awaited == Awaited::kNothing; }
};

void Expect(bool is_expected, const char* what) {
  if (!is_expected) Throw(ErrorCode::kTransport, what, " of a device channel arrived out of order");
}

bool IsAllowed(std::string_view transport, const ChannelPeer& peer) {
  return transport == "local" || std::ranges::count(peer.allowed, transport) > 0;
}

constexpr std::string_view kNotAllowed =
    "not allowed (option transports) or not proven (option qualification)";

std::unique_ptr<RankChannel> NewChannel(std::unique_ptr<DeviceChannel> end,
                                        std::string_view transport) {
  auto channel = std::make_unique<RankChannel>();
  channel->end = std::move(end);
  channel->transport = transport;
  return channel;
}

using Lanes = std::vector<std::shared_ptr<Lane>>;

// Logs each text once: many lanes leave a path that fails.
Lane::LogFunction LogOnce(Severity least_severity) {
  if (least_severity > Severity::kWarning) return [](std::string_view /*what*/) {};
  struct Said {
    std::mutex mutex;
    std::set<std::string> texts;
  };
  return [said = std::make_shared<Said>()](std::string_view what) {
    const std::lock_guard lock(said->mutex);
    if (said->texts.emplace(what).second) LogLine(StrCat("jaxhet: device channels: ", what));
  };
}

Lanes MakeLanes(ChannelSockets& of_pair, const ChannelOptions& options,
                const Lane::LogFunction& log) {
  size_t next = 0;
  const size_t per_lane = of_pair.sockets.size() / of_pair.num_lanes;
  Lanes lanes;
  for (size_t lane = 0; lane < of_pair.num_lanes; ++lane) {
    sockets::SocketSetup setup{.control_fd = of_pair.sockets[next].get(),
                               .data = {},
                               .keys = {},
                               .chunk_bytes = sockets::kWholeTransfers,  // a slot is one chunk
                               .path_timeout = PathTimeout(options.engine)};
    Lane::Messages messages{std::move(of_pair.sockets[next]), std::move(of_pair.keys[next])};
    for (const size_t end = next++ + per_lane; next < end; ++next) {
      setup.data.push_back(std::move(of_pair.sockets[next]));
      setup.keys.push_back(std::move(of_pair.keys[next]));
    }
    lanes.push_back(std::make_shared<Lane>(
        std::move(messages), log,
        [&setup](ConnectionHost& host) { return sockets::OpenSockets(std::move(setup), host); }));
  }
  return lanes;
}

class ChannelNegotiation {
 public:
  ChannelNegotiation(std::span<const ChannelPeer> peers,
                     std::span<const std::unique_ptr<DeviceRank>> ranks,
                     std::span<const ChannelPair> pairs, std::span<ChannelSockets> sockets,
                     const ChannelOptions& options, JobView& job)
      : peers_(peers), ranks_(ranks), options_(options), job_(job) {
    for (const auto& rank : ranks) {
      for (const auto& [own_rank, peer_rank] : pairs) {
        if (own_rank != rank->rank()) continue;
        const ChannelPeer& peer = PeerOf(peer_rank);
        ends_.push_back({rank.get(), &peer, true, Awaited::kAnswer});
        ends_.push_back({rank.get(), &peer, false, Awaited::kOffer});
      }
    }
    const Lane::LogFunction log = LogOnce(LeastSeverity(options.engine.log_level));
    for (ChannelSockets& of_pair : sockets) {
      lanes_[{of_pair.rank, of_pair.peer_rank}] = MakeLanes(of_pair, options, log);
    }
  }

  void Run(Time deadline) {
    for (ChannelEnd& end : ends_) {
      if (end.is_incoming) Offer(end);
    }
    while (!std::ranges::all_of(ends_, &ChannelEnd::is_open)) {
      if (const auto failure = job_.failure()) throw Error(*failure);
      const auto messages =
          job_.TakeChannelMessages([this](const auto& message) { return IsWanted(message); });
      for (const ChannelMessage& message : messages) {
        AttributeTo(
            message.process, [&] { return StrCat("process ", message.process, ": "); },
            [&] { Handle(message); });
      }
      if (messages.empty()) CheckNobodyLeft();
      if (Clock::now() > deadline) ThrowLate();
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    SayRemarks();
    for (auto& [rank, peer, is_incoming, awaited, channel, next, proof, refusals] : ends_) {
      channel->end->Settle(rank->proxy());
      channel->process = peer->process;
      channel->refusals = std::move(refusals);
      rank->channels().Add(peer->rank, is_incoming, std::move(channel));
    }
  }

 private:
  // Each once.
  void SayRemarks() const {
    if (LeastSeverity(options_.engine.log_level) > Severity::kInfo) return;
    std::set<std::string> remarks;
    for (const ChannelEnd& end : ends_) {
      const std::string remark = end.channel->end->Remark();
      if (remark.empty()) continue;
      remarks.insert(StrCat("jaxhet: rank ", end.rank->rank(), ": ", remark));
    }
    for (const std::string& remark : remarks) LogLine(remark);
  }

  // Channels to different targets are proven at the same time.
  std::span<std::byte> OperandsFor(const DeviceRank& rank, const ChannelPeer& target) const {
    const auto found = options_.operands.find(rank.rank());
    const size_t begin = static_cast<size_t>(target.rank) * kProofBytes;
    if (found == options_.operands.end() || !InBounds(begin, kProofBytes, found->second.size())) {
      return {};
    }
    return found->second.subspan(begin, kProofBytes);
  }

  const ChannelPeer& PeerOf(int rank) const {
    const auto found = std::ranges::find(peers_, rank, &ChannelPeer::rank);
    if (found != peers_.end()) return *found;
    Throw(ErrorCode::kUsage, "rank ", rank, " is not known to the set-up of device channels");
  }

  size_t SlotBytesOf(DeviceRank& rank, const ArenaPiece* piece) const {
    if (piece != nullptr) return piece->slot_bytes;
    const auto num_channels = std::ranges::count_if(
        ends_, [&](const ChannelEnd& end) { return end.is_incoming && end.rank == &rank; });
    return FairSlotBytes(static_cast<size_t>(options_.engine.slot_bytes),
                         rank.channels().has_arena() ? kMostDeviceBytes / 2 : kMostDeviceBytes,
                         static_cast<size_t>(num_channels));
  }

  // Not about a channel that another thread sets up.
  bool IsWanted(const ChannelMessage& message) const {
    std::string_view body = message.body;
    if (body.size() < sizeof(ChannelStepInfo)) return true;
    const auto info = TakeInfo<ChannelStepInfo>(body);
    const auto is_here = [&](const ChannelEnd& end) {
      const std::pair joined(end.peer->rank, end.rank->rank());
      return joined == std::pair(info.source, info.target) ||
             joined == std::pair(info.target, info.source);
    };
    const auto is_of_arena = [&](const auto& rank) {
      return (rank->rank() == info.source && rank->channels().PieceFor(info.target, false)) ||
             (rank->rank() == info.target && rank->channels().PieceFor(info.source, true));
    };
    return std::ranges::any_of(ends_, is_here) || std::ranges::none_of(ranks_, is_of_arena);
  }

  // Throws if somebody has whom a channel waits for.
  void CheckNobodyLeft() const {
    for (const ChannelEnd& end : ends_) {
      const ChannelPeer& peer = *end.peer;
      if (end.is_open() || peer.same_process || !job_.HasLeft(peer.rank)) continue;
      throw LeftError({}, peer.name, peer.process);
    }
  }

  ChannelSetup SetupFor(const ChannelEnd& end) {
    DeviceRank& rank = *end.rank;
    const ChannelPeer& peer = *end.peer;
    const ArenaPiece* const piece = rank.channels().PieceFor(peer.rank, end.is_incoming);
    return {.device = rank.device(),
            .same_process = peer.same_process,
            .same_host = peer.same_host,
            .same_vendor = PeerOf(rank.rank()).vendor == peer.vendor,
            .slot_bytes = SlotBytesOf(rank, piece),
            .pull_bytes = static_cast<size_t>(options_.engine.eager_bytes) + 1,
            .operands = OperandsFor(rank, peer),
            .lanes = lanes_[{rank.rank(), peer.rank}],
            .nics = options_.nics,
            .piece = piece,
            .encryption = ParseEncryption(options_.engine.encryption)};
  }

  void Send(const ChannelEnd& end, ChannelStep step, std::string_view text = {},
            int32_t transport = 0) {
    const auto [source, target] = RanksOf(end);
    const ChannelStepInfo info{step, source, target, transport};
    std::string body(reinterpret_cast<const char*>(&info), sizeof info);
    job_.SendChannelMessage(end.peer->process, body.append(text));
  }

  // Source and target.
  static std::pair<int, int> RanksOf(const ChannelEnd& end) {
    const std::pair ranks(end.rank->rank(), end.peer->rank);
    return end.is_incoming ? std::pair(ranks.second, ranks.first) : ranks;
  }

  // Makes the best channel that has not been tried.
  void Offer(ChannelEnd& target) {
    target.channel.reset();
    const auto transports = DeviceTransports();
    while (target.next < transports.size()) {
      const size_t place = target.next++;
      const DeviceTransport& transport = transports[place];
      try {
        if (!IsAllowed(transport.name, *target.peer)) Throw(ErrorCode::kTransport, kNotAllowed);
        auto [end, offer] = transport.make(SetupFor(target));
        target.channel = NewChannel(std::move(end), transport.name);
        target.awaited = Awaited::kAnswer;
        return Send(target, ChannelStep::kOffer, offer, static_cast<int32_t>(place));
      } catch (const Error& error) {
        target.refusals.push_back({std::string(transport.name), std::string(error.text())});
      }
    }
    std::string text =
        StrCat("no transport leads from ", target.peer->name, " to rank ", target.rank->rank(),
               " (", target.rank->device().info().ToString(), ")");
    for (const auto& [name, reason] : target.refusals) text += StrCat("; ", name, ": ", reason);
    throw Error(ErrorCode::kTransport, text, target.peer->process);
  }

  void Handle(const ChannelMessage& message) {
    std::string_view text = message.body;
    const auto info = TakeInfo<ChannelStepInfo>(text);
    ChannelEnd& end = Find(info, message.process);
    switch (info.step) {
      case ChannelStep::kOffer:
        return Open(end, info.transport, text);
      case ChannelStep::kAnswer:
        return Accept(end, text);
      case ChannelStep::kAccepted:
        return Prove(end, text);
      case ChannelStep::kProved:
        return Settle(end);
      case ChannelStep::kRefused:
        Expect(!end.is_open(), "the refusal");
        return TryNext(end, text);
      case ChannelStep::kSettled:
        Expect(end.awaited == Awaited::kSettled, "the end");
        end.awaited = Awaited::kNothing;
        return;
    }
    Throw(ErrorCode::kTransport, "it sent a message about no device channel");
  }

  void TryNext(ChannelEnd& target, std::string_view refusal) {
    target.refusals.push_back({std::string(target.channel->transport), std::string(refusal)});
    Offer(target);
  }

  void Open(ChannelEnd& source, int32_t place, std::string_view offer) {
    Expect(!source.is_open(), "an offer");
    Refusing(source, [&] {
      source.channel.reset();
      const auto transports = DeviceTransports();
      if (place < 0 || std::cmp_greater_equal(place, transports.size())) {
        Throw(ErrorCode::kTransport, "no transport between devices has the number ", place);
      }
      const DeviceTransport& transport = transports[static_cast<size_t>(place)];
      if (!IsAllowed(transport.name, *source.peer)) Throw(ErrorCode::kTransport, kNotAllowed);
      source.channel = NewChannel(transport.open(SetupFor(source), offer), transport.name);
      Send(source, ChannelStep::kAnswer, source.channel->end->Answer());
      source.awaited = Awaited::kAccepted;
    });
  }

  void Accept(ChannelEnd& target, std::string_view answer) {
    Expect(target.awaited == Awaited::kAnswer, "an answer");
    try {
      target.channel->end->Accept(answer);
    } catch (const Error& error) {
      return TryNext(target, error.text());
    }
    target.proof.resize(kProofBytes);
    if (std::cmp_not_equal(getrandom(target.proof.data(), kProofBytes, 0), kProofBytes)) {
      ThrowErrno("getrandom");
    }
    Send(target, ChannelStep::kAccepted, target.proof);
    target.awaited = Awaited::kProof;
  }

  void Prove(ChannelEnd& source, std::string_view proof) {
    Expect(source.awaited == Awaited::kAccepted && proof.size() == kProofBytes, "a proof");
    Refusing(source, [&] {
      source.channel->end->Prove(source.rank->device(), std::as_bytes(std::span(proof)));
      Send(source, ChannelStep::kProved);
      source.awaited = Awaited::kSettled;
    });
  }

  void Settle(ChannelEnd& target) {
    Expect(target.awaited == Awaited::kProof, "the proof");
    const auto proof = std::as_bytes(std::span(target.proof));
    std::string why_not;
    try {
      if (!target.channel->end->IsProven(target.rank->device(), proof)) {
        why_not = "what the source's device wrote did not arrive";
      }
    } catch (const Error& error) {
      why_not = error.text();
    }
    if (!why_not.empty()) return TryNext(target, why_not);
    target.awaited = Awaited::kNothing;
    Send(target, ChannelStep::kSettled);
  }

  template <typename Function>
  void Refusing(ChannelEnd& source, Function function) {
    try {
      function();
    } catch (const Error& error) {
      source.channel.reset();
      source.awaited = Awaited::kOffer;
      Send(source, ChannelStep::kRefused, error.text());
    }
  }

  // End of the message's channel; the sender has the other one.
  ChannelEnd& Find(const ChannelStepInfo& info, int sender) {
    const bool is_to_target = info.step == ChannelStep::kAnswer ||
                              info.step == ChannelStep::kProved ||
                              info.step == ChannelStep::kRefused;
    const auto found = std::ranges::find_if(ends_, [&](const ChannelEnd& end) {
      return end.is_incoming == is_to_target && end.peer->process == sender &&
             RanksOf(end) == std::pair(info.source, info.target);
    });
    if (found != ends_.end()) return *found;
    Throw(ErrorCode::kTransport,
          "a message names a device channel that does not join its sender and us");
  }

  [[noreturn]] void ThrowLate() const {
    const auto open = std::ranges::find_if(
        ends_, [](const ChannelEnd& end) { return end.is_incoming && !end.is_open(); });
    if (open == ends_.end()) {
      Throw(ErrorCode::kDeadline,
            "the other processes have not settled their device channels in time");
    }
    throw Error(
        ErrorCode::kDeadline,
        StrCat(open->peer->name, " has not opened a device channel to rank ", open->rank->rank(),
               " in time; all processes must see the devices of their platform"),
        open->peer->process);
  }

  std::span<const ChannelPeer> peers_;
  std::span<const std::unique_ptr<DeviceRank>> ranks_;
  std::map<std::pair<int, int>, Lanes> lanes_;  // by own rank and peer
  const ChannelOptions& options_;
  JobView& job_;
  std::vector<ChannelEnd> ends_;
};

}  // namespace

void MakeArenas(std::span<const std::unique_ptr<DeviceRank>> ranks,
                std::span<const ChannelPair> later, int num_ranks, bool uses_nics,
                const ChannelOptions& options) {
  // Both ends come to the same size.
  const size_t slot_bytes =
      FairSlotBytes(std::min(static_cast<size_t>(options.engine.slot_bytes), kMostHostSlotBytes),
                    kMostDeviceBytes / 2, static_cast<size_t>(std::max(1, num_ranks - 1)));
  for (const auto& rank : ranks) {
    std::vector<int> peer_ranks;
    for (const auto& [own_rank, peer_rank] : later) {
      if (own_rank == rank->rank()) peer_ranks.push_back(peer_rank);
    }
    if (peer_ranks.empty()) continue;
    auto arena = std::make_unique<ChannelArena>(rank->device(), peer_ranks, slot_bytes);
    if (uses_nics) {
      try {
        arena->Register(options.nics->Near(rank->device().info().pci_bus_id));
      } catch (const Error& error) {
        LogLine(StrCat("jaxhet: rank ", rank->rank(),
                       ": channels that are opened later don't use RDMA: ", error.text()));
      }
    }
    rank->channels().SetArena(std::move(arena));
  }
}

void SetUpChannels(std::span<const ChannelPeer> peers,
                   std::span<const std::unique_ptr<DeviceRank>> ranks,
                   std::span<const ChannelPair> pairs, std::span<ChannelSockets> sockets,
                   const ChannelOptions& options, JobView& job, Time deadline) {
  ChannelNegotiation(peers, ranks, pairs, sockets, options, job).Run(deadline);
}

}  // namespace jaxhet
