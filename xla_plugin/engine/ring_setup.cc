#include "xla_plugin/engine/ring_setup.h"

#include <sys/random.h>

#include <algorithm>
#include <array>
#include <thread>

namespace jaxhet {
namespace {

// How far a source and a target are with their ring.
enum class RingStep : int32_t {
  kOffer,    // target: (transport, offer, proof); replaces the one before
  kOpened,   // source: (); the proof lies in slot 0
  kRefused,  // source: (reason)
  kSettled,  // target: (); the ring can be used
};

struct RingInfo {
  RingStep step;
  int32_t source;
  int32_t target;
};

constexpr size_t kProofBytes = 64;
// All rings to one device together, at most.
constexpr size_t kMostDeviceBytes = size_t{256} << 20;
constexpr size_t kLeastSlotBytes = size_t{256} << 10;

struct Incoming {
  Incoming(DeviceRank* its_rank, const RingPeer* its_source) : rank(its_rank), source(its_source) {}

  DeviceRank* rank;
  const RingPeer* source;
  size_t next = 0;  // transport to try
  std::unique_ptr<RankRing> ring;
  std::string proof;
  std::string refusals;
  bool is_settled = false;
};

struct Outgoing {
  Outgoing(DeviceRank* its_rank, const RingPeer* its_target) : rank(its_rank), target(its_target) {}

  DeviceRank* rank;
  const RingPeer* target;
  std::unique_ptr<RankRing> ring;
};

std::unique_ptr<RankRing> NewRing(std::unique_ptr<RingEnd> end, std::string_view transport) {
  auto ring = std::make_unique<RankRing>();
  ring->end = std::move(end);
  ring->transport = transport;
  return ring;
}

class RingSetUp {
 public:
  RingSetUp(std::span<const RingPeer> peers, std::span<const std::unique_ptr<DeviceRank>> ranks,
            std::span<const RingSockets> sockets, size_t slot_bytes, const RingMail& mail)
      : peers_(peers), sockets_(sockets), mail_(mail) {
    const size_t others = std::max<size_t>(peers.size(), 2) - 1;
    const size_t fair = kMostDeviceBytes / (kRingSlots * others) / kLeastSlotBytes;
    slot_bytes_ = std::min(slot_bytes, std::max<size_t>(fair, 1) * kLeastSlotBytes);
    for (const auto& rank : ranks) {
      for (const RingPeer& peer : peers) {
        if (peer.rank == rank->rank()) continue;
        incoming_.emplace_back(rank.get(), &peer);
        outgoing_.emplace_back(rank.get(), &peer);
      }
    }
    num_open_ = incoming_.size() + outgoing_.size();
  }

  void Run(Time deadline) {
    for (Incoming& ring : incoming_) Offer(ring);
    while (num_open_ > 0) {
      mail_.check();
      for (const Core::RingMessage& message : mail_.receive()) Handle(message);
      if (Clock::now() > deadline) ThrowLate();
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    for (Incoming& ring : incoming_) {
      ring.ring->end->Settle();
      ring.rank->AddIncoming(ring.source->rank, std::move(ring.ring));
    }
    for (Outgoing& ring : outgoing_) {
      ring.ring->end->Settle();
      ring.rank->AddOutgoing(ring.target->rank, std::move(ring.ring));
    }
  }

 private:
  RingSetup SetupFor(DeviceRank& rank, const RingPeer& peer) const {
    const auto* const own = std::ranges::find(peers_, rank.rank(), &RingPeer::rank).base();
    const auto sockets = std::ranges::find_if(sockets_, [&](const RingSockets& entry) {
      return entry.rank == rank.rank() && entry.peer_rank == peer.rank;
    });
    return {.device = rank.device(),
            .same_process = peer.same_process,
            .same_host = peer.same_host,
            .same_vendor = own->vendor == peer.vendor,
            .slot_bytes = slot_bytes_,
            .sockets = sockets == sockets_.end() ? std::span<const Fd>() : sockets->sockets};
  }

  void Send(const RingPeer& to, RingStep step, int source, int target,
            std::span<const std::string> strings) {
    const RingInfo info{step, source, target};
    const std::string table = PackStrings(strings);
    mail_.send(to.process, std::array{ObjectIovec(info), ToIovec(table.data(), table.size())});
  }

  // Makes the best ring that has not been tried.
  void Offer(Incoming& incoming) {
    incoming.ring.reset();
    const auto transports = RingTransports();
    while (incoming.next < transports.size()) {
      const RingTransport& transport = transports[incoming.next++];
      try {
        if (transport.name != "local" &&
            std::ranges::count(incoming.source->allowed, transport.name) == 0) {
          Throw(ErrorCode::kTransport, "not allowed (option transports)");
        }
        auto [end, offer] = transport.make(SetupFor(*incoming.rank, *incoming.source));
        incoming.ring = NewRing(std::move(end), transport.name);
        incoming.proof.resize(kProofBytes);
        if (std::cmp_not_equal(getrandom(incoming.proof.data(), kProofBytes, 0), kProofBytes)) {
          ThrowErrno("getrandom");
        }
        return Send(*incoming.source, RingStep::kOffer, incoming.source->rank,
                    incoming.rank->rank(),
                    std::array{std::string(transport.name), std::move(offer), incoming.proof});
      } catch (const Error& error) {
        incoming.refusals += StrCat("; ", transport.name, ": ", error.text());
      }
    }
    Throw(ErrorCode::kTransport, "no transport leads from ", incoming.source->name, " to rank ",
          incoming.rank->rank(), " (", incoming.rank->device().info().ToString(), ")",
          incoming.refusals);
  }

  void Handle(const Core::RingMessage& message) {
    std::string_view body = message.body;
    const auto info = TakeInfo<RingInfo>(body);
    const std::vector<std::string> strings = UnpackStrings(body);
    switch (info.step) {
      case RingStep::kOffer:
        return Open(OutgoingOf(info), strings);
      case RingStep::kSettled:
        --num_open_;
        return;
      case RingStep::kOpened:
        return Settle(IncomingOf(info));
      case RingStep::kRefused: {
        Incoming& incoming = IncomingOf(info);
        incoming.refusals += StrCat("; ", incoming.ring->transport, ": ", strings.at(0));
        return Offer(incoming);
      }
    }
    Throw(ErrorCode::kTransport, "process ", message.process, " sent a message about no ring");
  }

  void Open(Outgoing& outgoing, std::span<const std::string> strings) {
    const int source = outgoing.rank->rank();
    const int target = outgoing.target->rank;
    try {
      const RingTransport& transport = RingTransportOf(strings[0]);
      outgoing.ring = NewRing(
          transport.open(SetupFor(*outgoing.rank, *outgoing.target), strings[1]), transport.name);
      outgoing.ring->end->Prove(outgoing.rank->device(), std::as_bytes(std::span(strings[2])));
      Send(*outgoing.target, RingStep::kOpened, source, target, {});
    } catch (const Error& error) {
      outgoing.ring.reset();
      Send(*outgoing.target, RingStep::kRefused, source, target,
           std::array{std::string(error.text())});
    }
  }

  void Settle(Incoming& incoming) {
    const auto proof = std::as_bytes(std::span(incoming.proof));
    if (!incoming.ring->end->IsProven(incoming.rank->device(), proof)) {
      incoming.refusals +=
          StrCat("; ", incoming.ring->transport, ": what the source's device wrote did not arrive");
      return Offer(incoming);
    }
    incoming.is_settled = true;
    --num_open_;
    Send(*incoming.source, RingStep::kSettled, incoming.source->rank, incoming.rank->rank(), {});
  }

  Incoming& IncomingOf(const RingInfo& info) {
    return Find(incoming_, [&](const Incoming& ring) {
      return ring.source->rank == info.source && ring.rank->rank() == info.target;
    });
  }
  Outgoing& OutgoingOf(const RingInfo& info) {
    return Find(outgoing_, [&](const Outgoing& ring) {
      return ring.target->rank == info.target && ring.rank->rank() == info.source;
    });
  }
  template <typename Ring, typename Predicate>
  static Ring& Find(std::vector<Ring>& rings, Predicate predicate) {
    const auto found = std::ranges::find_if(rings, predicate);
    if (found != rings.end()) return *found;
    Throw(ErrorCode::kTransport, "a message names a ring between ranks that are not here");
  }

  [[noreturn]] void ThrowLate() const {
    const auto open = std::ranges::find(incoming_, false, &Incoming::is_settled);
    if (open == incoming_.end()) {
      Throw(ErrorCode::kDeadline, "the other processes have not settled their rings in time");
    }
    throw Error(ErrorCode::kDeadline,
                StrCat(open->source->name, " has not opened a ring to rank ", open->rank->rank(),
                       " in time; all processes must see the devices of their platform"),
                open->source->process);
  }

  std::span<const RingPeer> peers_;
  std::span<const RingSockets> sockets_;
  const RingMail& mail_;
  size_t slot_bytes_;
  std::vector<Incoming> incoming_;
  std::vector<Outgoing> outgoing_;
  size_t num_open_ = 0;
};

}  // namespace

void SetUpRings(std::span<const RingPeer> peers, std::span<const std::unique_ptr<DeviceRank>> ranks,
                std::span<const RingSockets> sockets, size_t slot_bytes, const RingMail& mail,
                Time deadline) {
  RingSetUp(peers, ranks, sockets, slot_bytes, mail).Run(deadline);
}

}  // namespace jaxhet
