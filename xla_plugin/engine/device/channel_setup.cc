#include "xla_plugin/engine/device/channel_setup.h"

#include <sys/random.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <set>
#include <thread>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/net/socket/socket_connection.h"
#include "xla_plugin/transport/device_channel/lane.h"

namespace jaxhet {
namespace {

// How far a source and a target are with their channel.
enum class ChannelStep : int32_t {
  kOffer,     // target: (transport, offer); replaces the one before
  kAnswer,    // source: (answer); the channel is open
  kAccepted,  // target: (proof)
  kProved,    // source: (); the proof lies in slot 0
  kRefused,   // source: (reason)
  kSettled,   // target: (); the channel can be used
};

struct ChannelStepInfo {
  ChannelStep step;
  int32_t source;
  int32_t target;
};

// Message that a target waits for.
enum class IncomingState { kAnswer, kProof, kNothing };

struct Incoming {
  Incoming(DeviceRank* its_rank, const ChannelPeer* its_source)
      : rank(its_rank), source(its_source) {}

  DeviceRank* rank;
  const ChannelPeer* source;
  size_t next = 0;  // transport to try
  std::unique_ptr<RankChannel> channel;
  std::string proof;
  std::vector<Refusal> refusals;
  IncomingState state = IncomingState::kAnswer;
};

// Message that a source waits for; in all states but the last the target may make another offer.
enum class OutgoingState { kOffer, kAccepted, kSettled, kNothing };

struct Outgoing {
  Outgoing(DeviceRank* its_rank, const ChannelPeer* its_target)
      : rank(its_rank), target(its_target) {}

  DeviceRank* rank;
  const ChannelPeer* target;
  std::unique_ptr<RankChannel> channel;
  OutgoingState state = OutgoingState::kOffer;
};

void Expect(bool is_expected, const char* what) {
  if (!is_expected) Throw(ErrorCode::kTransport, what, " of a device channel arrived out of order");
}

void CheckArity(const ChannelStepInfo& info, std::span<const std::string> strings) {
  const size_t count = info.step == ChannelStep::kOffer ? 2 : 1;
  if (strings.size() == count) return;
  Throw(ErrorCode::kTransport, "a message about a device channel has ", strings.size(),
        " strings, not ", count);
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
                               .path_timeout = options.path_timeout};
    Lane::Messages messages{std::move(of_pair.sockets[next]), std::move(of_pair.keys[next])};
    for (const size_t end = next++ + per_lane; next < end; ++next) {
      setup.data.push_back(std::move(of_pair.sockets[next]));
      setup.keys.push_back(std::move(of_pair.keys[next]));
    }
    lanes.push_back(
        std::make_shared<Lane>(std::move(messages), log, [&setup](ConnectionHost& host) {
          return std::make_unique<sockets::SocketConnection>(std::move(setup), host);
        }));
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
        incoming_.emplace_back(rank.get(), &peer);
        outgoing_.emplace_back(rank.get(), &peer);
      }
    }
    num_open_ = incoming_.size() + outgoing_.size();
    const Lane::LogFunction log = LogOnce(options.least_severity);
    for (ChannelSockets& of_pair : sockets) {
      lanes_[{of_pair.rank, of_pair.peer_rank}] = MakeLanes(of_pair, options, log);
    }
  }

  void Run(Time deadline) {
    for (Incoming& incoming : incoming_) Offer(incoming);
    while (num_open_ > 0) {
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
    for (Incoming& incoming : incoming_) {
      incoming.channel->end->Settle(incoming.rank->proxy());
      incoming.rank->channels().AddIncoming(incoming.source->rank, std::move(incoming.channel));
    }
    for (Outgoing& outgoing : outgoing_) {
      outgoing.channel->end->Settle(outgoing.rank->proxy());
      outgoing.rank->channels().AddOutgoing(outgoing.target->rank, std::move(outgoing.channel));
    }
  }

 private:
  // Each once.
  void SayRemarks() const {
    if (options_.least_severity > Severity::kInfo) return;
    std::set<std::string> remarks;
    const auto add = [&](const DeviceRank* rank, const RankChannel& channel) {
      const std::string remark = channel.end->Remark();
      if (remark.empty()) return;
      remarks.insert(StrCat("jaxhet: rank ", rank->rank(), ": ", remark));
    };
    for (const Incoming& incoming : incoming_) add(incoming.rank, *incoming.channel);
    for (const Outgoing& outgoing : outgoing_) add(outgoing.rank, *outgoing.channel);
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
    const auto num_channels = std::ranges::count(
        incoming_, rank.rank(), [](const Incoming& incoming) { return incoming.rank->rank(); });
    return FairSlotBytes(options_.slot_bytes,
                         rank.channels().has_arena() ? kMostDeviceBytes / 2 : kMostDeviceBytes,
                         static_cast<size_t>(num_channels));
  }

  // Not about a channel that another thread sets up.
  bool IsWanted(const ChannelMessage& message) const {
    std::string_view body = message.body;
    if (body.size() < sizeof(ChannelStepInfo)) return true;
    const auto info = TakeInfo<ChannelStepInfo>(body);
    const auto is_here = [&](const Incoming& incoming) {
      const std::pair joined(incoming.source->rank, incoming.rank->rank());
      return joined == std::pair(info.source, info.target) ||
             joined == std::pair(info.target, info.source);
    };
    const auto is_of_arena = [&](const auto& rank) {
      return (rank->rank() == info.source && rank->channels().PieceFor(info.target, false)) ||
             (rank->rank() == info.target && rank->channels().PieceFor(info.source, true));
    };
    return std::ranges::any_of(incoming_, is_here) || std::ranges::none_of(ranks_, is_of_arena);
  }

  // Throws if somebody has whom a channel waits for.
  void CheckNobodyLeft() const {
    const auto check = [this](const ChannelPeer& peer) {
      if (peer.same_process || !job_.HasLeft(peer.rank)) return;
      throw LeftError({}, peer.name, peer.process);
    };
    for (const Incoming& incoming : incoming_) {
      if (incoming.state != IncomingState::kNothing) check(*incoming.source);
    }
    for (const Outgoing& outgoing : outgoing_) {
      if (outgoing.state != OutgoingState::kNothing) check(*outgoing.target);
    }
  }

  // Set-up of the channel from `peer` to the rank, or of the channel back.
  ChannelSetup SetupFor(DeviceRank& rank, const ChannelPeer& peer, bool is_incoming) {
    const ArenaPiece* const piece = rank.channels().PieceFor(peer.rank, is_incoming);
    return {.device = rank.device(),
            .same_process = peer.same_process,
            .same_host = peer.same_host,
            .same_vendor = PeerOf(rank.rank()).vendor == peer.vendor,
            .slot_bytes = SlotBytesOf(rank, piece),
            .pull_bytes = options_.pull_bytes,
            .operands = OperandsFor(rank, peer),
            .lanes = lanes_[{rank.rank(), peer.rank}],
            .nics = options_.nics,
            .piece = piece,
            .encryption = options_.encryption};
  }

  void Send(const Incoming& incoming, ChannelStep step, std::string_view text = {}) {
    Send(*incoming.source, {step, incoming.source->rank, incoming.rank->rank()},
         std::array{std::string(text)});
  }
  void Send(const Outgoing& outgoing, ChannelStep step, std::string_view text = {}) {
    Send(*outgoing.target, {step, outgoing.rank->rank(), outgoing.target->rank},
         std::array{std::string(text)});
  }
  void Send(const ChannelPeer& to, const ChannelStepInfo& info,
            std::span<const std::string> strings) {
    std::string body(reinterpret_cast<const char*>(&info), sizeof info);
    job_.SendChannelMessage(to.process, body += PackStrings(strings));
  }

  // Makes the best channel that has not been tried.
  void Offer(Incoming& incoming) {
    incoming.channel.reset();
    const auto transports = DeviceTransports();
    while (incoming.next < transports.size()) {
      const DeviceTransport& transport = transports[incoming.next++];
      try {
        if (!IsAllowed(transport.name, *incoming.source)) {
          Throw(ErrorCode::kTransport, kNotAllowed);
        }
        auto [end, offer] = transport.make(SetupFor(*incoming.rank, *incoming.source, true));
        incoming.channel = NewChannel(std::move(end), transport.name);
        incoming.state = IncomingState::kAnswer;
        return Send(*incoming.source,
                    {ChannelStep::kOffer, incoming.source->rank, incoming.rank->rank()},
                    std::array{std::string(transport.name), std::move(offer)});
      } catch (const Error& error) {
        incoming.refusals.push_back({std::string(transport.name), std::string(error.text())});
      }
    }
    std::string text =
        StrCat("no transport leads from ", incoming.source->name, " to rank ",
               incoming.rank->rank(), " (", incoming.rank->device().info().ToString(), ")");
    for (const auto& [name, reason] : incoming.refusals) text += StrCat("; ", name, ": ", reason);
    throw Error(ErrorCode::kTransport, text, incoming.source->process);
  }

  void Handle(const ChannelMessage& message) {
    std::string_view body = message.body;
    const auto info = TakeInfo<ChannelStepInfo>(body);
    const std::vector<std::string> strings = UnpackStrings(body);
    CheckArity(info, strings);
    switch (info.step) {
      case ChannelStep::kOffer:
        return Open(OutgoingOf(info, message.process), strings);
      case ChannelStep::kAnswer:
        return Accept(IncomingOf(info, message.process), strings[0]);
      case ChannelStep::kAccepted:
        return Prove(OutgoingOf(info, message.process), strings[0]);
      case ChannelStep::kProved:
        return Settle(IncomingOf(info, message.process));
      case ChannelStep::kRefused:
        return OnRefusal(IncomingOf(info, message.process), strings[0]);
      case ChannelStep::kSettled:
        return OnSettled(OutgoingOf(info, message.process));
    }
    Throw(ErrorCode::kTransport, "it sent a message about no device channel");
  }

  void OnRefusal(Incoming& incoming, std::string_view refusal) {
    Expect(incoming.state != IncomingState::kNothing, "the refusal");
    TryNext(incoming, refusal);
  }

  void OnSettled(Outgoing& outgoing) {
    Expect(outgoing.state == OutgoingState::kSettled, "the end");
    outgoing.state = OutgoingState::kNothing;
    --num_open_;
  }

  void TryNext(Incoming& incoming, std::string_view refusal) {
    incoming.refusals.push_back({std::string(incoming.channel->transport), std::string(refusal)});
    Offer(incoming);
  }

  void Open(Outgoing& outgoing, std::span<const std::string> strings) {
    Expect(outgoing.state != OutgoingState::kNothing, "an offer");
    Refusing(outgoing, [&] {
      outgoing.channel.reset();
      const DeviceTransport& transport = DeviceTransportOf(strings[0]);
      if (!IsAllowed(transport.name, *outgoing.target)) Throw(ErrorCode::kTransport, kNotAllowed);
      const ChannelSetup setup = SetupFor(*outgoing.rank, *outgoing.target, false);
      outgoing.channel = NewChannel(transport.open(setup, strings[1]), transport.name);
      Send(outgoing, ChannelStep::kAnswer, outgoing.channel->end->Answer());
      outgoing.state = OutgoingState::kAccepted;
    });
  }

  void Accept(Incoming& incoming, std::string_view answer) {
    Expect(incoming.state == IncomingState::kAnswer, "an answer");
    try {
      incoming.channel->end->Accept(answer);
    } catch (const Error& error) {
      return TryNext(incoming, error.text());
    }
    incoming.proof.resize(kProofBytes);
    if (std::cmp_not_equal(getrandom(incoming.proof.data(), kProofBytes, 0), kProofBytes)) {
      ThrowErrno("getrandom");
    }
    Send(incoming, ChannelStep::kAccepted, incoming.proof);
    incoming.state = IncomingState::kProof;
  }

  void Prove(Outgoing& outgoing, std::string_view proof) {
    Expect(outgoing.state == OutgoingState::kAccepted && proof.size() == kProofBytes, "a proof");
    Refusing(outgoing, [&] {
      outgoing.channel->end->Prove(outgoing.rank->device(), std::as_bytes(std::span(proof)));
      Send(outgoing, ChannelStep::kProved);
      outgoing.state = OutgoingState::kSettled;
    });
  }

  void Settle(Incoming& incoming) {
    Expect(incoming.state == IncomingState::kProof, "the proof");
    const auto proof = std::as_bytes(std::span(incoming.proof));
    std::string why_not;
    try {
      if (!incoming.channel->end->IsProven(incoming.rank->device(), proof)) {
        why_not = "what the source's device wrote did not arrive";
      }
    } catch (const Error& error) {
      why_not = error.text();
    }
    if (!why_not.empty()) return TryNext(incoming, why_not);
    incoming.state = IncomingState::kNothing;
    incoming.channel->refusals = std::move(incoming.refusals);
    --num_open_;
    Send(incoming, ChannelStep::kSettled);
  }

  template <typename Function>
  void Refusing(Outgoing& outgoing, Function function) {
    try {
      function();
    } catch (const Error& error) {
      outgoing.channel.reset();
      outgoing.state = OutgoingState::kOffer;
      Send(outgoing, ChannelStep::kRefused, error.text());
    }
  }

  // Channel of the message; the sender has its other end.
  Incoming& IncomingOf(const ChannelStepInfo& info, int sender) {
    return Find(incoming_, [&](const Incoming& incoming) {
      return incoming.source->rank == info.source && incoming.rank->rank() == info.target &&
             incoming.source->process == sender;
    });
  }
  Outgoing& OutgoingOf(const ChannelStepInfo& info, int sender) {
    return Find(outgoing_, [&](const Outgoing& outgoing) {
      return outgoing.target->rank == info.target && outgoing.rank->rank() == info.source &&
             outgoing.target->process == sender;
    });
  }
  template <typename Entry, typename Predicate>
  static Entry& Find(std::vector<Entry>& entries, Predicate predicate) {
    const auto found = std::ranges::find_if(entries, predicate);
    if (found != entries.end()) return *found;
    Throw(ErrorCode::kTransport,
          "a message names a device channel that does not join its sender and us");
  }

  [[noreturn]] void ThrowLate() const {
    const auto open = std::ranges::find_if(incoming_, [](const Incoming& incoming) {
      return incoming.state != IncomingState::kNothing;
    });
    if (open == incoming_.end()) {
      Throw(ErrorCode::kDeadline,
            "the other processes have not settled their device channels in time");
    }
    throw Error(
        ErrorCode::kDeadline,
        StrCat(open->source->name, " has not opened a device channel to rank ", open->rank->rank(),
               " in time; all processes must see the devices of their platform"),
        open->source->process);
  }

  std::span<const ChannelPeer> peers_;
  std::span<const std::unique_ptr<DeviceRank>> ranks_;
  std::map<std::pair<int, int>, Lanes> lanes_;  // by own rank and peer
  const ChannelOptions& options_;
  JobView& job_;
  std::vector<Incoming> incoming_;
  std::vector<Outgoing> outgoing_;
  size_t num_open_ = 0;
};

}  // namespace

void MakeArenas(std::span<const std::unique_ptr<DeviceRank>> ranks,
                std::span<const ChannelPair> later, int num_ranks, bool uses_nics,
                const ChannelOptions& options) {
  // Both ends come to the same size.
  const size_t slot_bytes =
      FairSlotBytes(std::min(options.slot_bytes, kMostHostSlotBytes), kMostDeviceBytes / 2,
                    static_cast<size_t>(std::max(1, num_ranks - 1)));
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
