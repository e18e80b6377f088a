#include "xla_plugin/transport/verbs/verbs_channel.h"

#include <fcntl.h>
#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <mutex>
#include <optional>
#include <vector>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"
#include "xla_plugin/net/socket/message_socket.h"
#include "xla_plugin/transport/device_channel/proxied_channel.h"
#include "xla_plugin/transport/device_channel/proxy.h"
#include "xla_plugin/transport/verbs/device_slots.h"
#include "xla_plugin/transport/verbs/nics.h"
#include "xla_plugin/transport/verbs/operand_region.h"
#include "xla_plugin/transport/verbs/slot_link.h"

namespace jaxhet {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;

// The other way go credits alone, which need no memory to speak of.
constexpr size_t kNothing = verbs::SlotLink::kHeaderBytes;
constexpr milliseconds kProofTimeout{5'000};

static_assert(sizeof(DeviceChunkInfo) <= verbs::SlotLink::kHeaderBytes);

struct VerbsOfferInfo {
  uint64_t slot_bytes;
};

std::vector<std::shared_ptr<verbs::Nic>> NicsOf(const ChannelSetup& setup) {
  return setup.nics->Near(setup.device.info().pci_bus_id);
}

// Largest message that every NIC can send.
size_t MostBytes(const ChannelSetup& setup) {
  size_t most = SIZE_MAX;
  for (const auto& nic : NicsOf(setup)) most = std::min<size_t>(most, nic->info.max_message);
  return most;
}

class VerbsChannel : public ProxiedChannel, protected ProxyTask, private PeerHost {
 public:
  std::string Answer() override { return link_.Offer(); }
  std::vector<int> SocketFds() const override { return {socket_.socket().fd()}; }
  std::string Remark() const override {
    return slots_.is_pinned() ? StrCat("RDMA goes through ", slots_.way()) : std::string();
  }
  void Settle(Proxy& proxy) override { proxy.Add(*this); }
  void Launched() override { Wake(); }
  void Cut() override {
    const std::lock_guard lock(mutex_);
    is_over_ = true;
  }

 protected:
  // `is_source`: its slots go out; else they come in.
  VerbsChannel(const ChannelSetup& setup, size_t slot_bytes, bool is_source)
      : ProxiedChannel(setup.device, 1),
        least_severity_(setup.least_severity),
        socket_(Fd(fcntl(setup.messages->get(), F_DUPFD_CLOEXEC, 0))),
        nics_(NicsOf(setup)),
        slots_(setup.device, nics_, setup.nics->options(), kChannelSlots, slot_bytes),
        nothing_(nics_, kChannelSlots, kNothing, ibv::kAccessLocalWrite | ibv::kAccessRemoteWrite),
        link_(nics_, setup.nics->options(),
              {.outgoing = is_source ? slots_.slots() : nothing_.slots(),
               .incoming = is_source ? nothing_.slots() : slots_.slots(),
               .count = kChannelSlots,
               .chunk_bytes = slot_bytes,
               .headers = verbs::SlotLink::Headers::kOfEachSlot},
              *this) {
    SetSlots(slots_.device_address(), slot_bytes);
  }

  std::vector<Pollable*> Pollables() override {
    std::vector<Pollable*> pollables = link_.Pollables();
    pollables.push_back(&socket_.socket());
    return pollables;
  }
  State Advance() final {
    const std::lock_guard lock(mutex_);
    if (is_over_) return State::kIdle;
    try {
      Pump();
      if (Move()) return State::kMoved;
      if (is_busy() || link_.IsBusy()) return State::kWaiting;
      return link_.Arm() ? State::kWaiting : State::kIdle;
    } catch (const Error& error) {
      is_over_ = true;
      Fail(error);
      return State::kIdle;
    }
  }
  // Moves chunks; false if none can move.
  virtual bool Move() = 0;
  // Chunks wait for a device or a NIC.
  virtual bool is_busy() const = 0;

  verbs::SlotLink& link() { return link_; }
  verbs::DeviceSlots& device_slots() { return slots_; }

  // Takes completions and messages.
  void Pump() {
    while (const auto message = socket_.Receive()) {
      link_.OnMessage(std::as_bytes(std::span(*message)));
    }
    link_.Poll();
  }
  // In set-up, before there is a proxy: the same until `is_over` or for kProofTimeout.
  template <typename IsOver>
  bool PumpUntil(IsOver is_over) {
    const Time limit = Clock::now() + kProofTimeout;
    while (!is_over()) {
      if (Clock::now() > limit) return false;
      for (Pollable* const pollable : Pollables()) pollable->OnEvents(EPOLLIN);
      Pump();
    }
    return true;
  }

  size_t num_open_ = 0;  // chunks under way here

 private:
  void Send(std::span<const iovec> message) override { socket_.Send(message); }
  void Log(std::string_view what) override {
    if (least_severity_ <= Severity::kWarning) LogLine(StrCat("jaxhet: ", what));
  }
  void Lost(std::string_view why) override { Throw(ErrorCode::kTransport, why); }

  const Severity least_severity_;
  MessageSocket socket_;
  std::vector<std::shared_ptr<verbs::Nic>> nics_;
  verbs::DeviceSlots slots_;
  verbs::Staging nothing_;
  verbs::SlotLink link_;
  std::mutex mutex_;
  bool is_over_ = false;  // under mutex_
};

class VerbsSource final : public VerbsChannel {
 public:
  VerbsSource(const ChannelSetup& setup, size_t slot_bytes, std::string_view offer)
      : VerbsChannel(setup, slot_bytes, /*is_source=*/true), chunks_(words().source, slot_bytes) {
    link().Accept(offer);
    if (setup.operands.empty() || device_slots().is_pinned()) return;
    auto& shared = setup.nics->OperandsOf(setup.device);
    if (!shared) {
      shared = std::make_shared<verbs::OperandRegion>(setup.device, NicsOf(setup),
                                                      setup.nics->options(), setup.operands);
    }
    operands_ = shared;
    if (operands_->why_not().empty()) words().pull_bytes = setup.pull_bytes;
  }

  std::optional<uint64_t> PlaceOf(std::span<const std::byte> operand) const override {
    return operands_ ? operands_->AddressOf(operand) : std::nullopt;
  }

  std::string Remark() const override {
    if (!operands_ || operands_->why_not().empty()) return VerbsChannel::Remark();
    return StrCat("operands are copied before RDMA: ", operands_->why_not());
  }

  // The operand may change from now on, so NICs must not send any more.
  void Cut() override {
    VerbsChannel::Cut();
    link().Kill();
  }

  void Prove(Device& device, std::span<const std::byte> proof) override {
    DeviceChannel::Prove(device, proof);
    std::memset(link().header(0), 0, verbs::SlotLink::kHeaderBytes);
    link().Start(0, proof.size());
    link().SendTo(0, proof.size());
    if (!PumpUntil([this] { return link().IsSent(0); })) {
      Throw(ErrorCode::kTransport, "the peer's NIC has not answered");
    }
  }

 protected:
  bool Move() override {
    const bool has_moved = ReturnSlots() + SendNext() > 0;
    if (has_moved) ComeTo(0, chunks_.exchange());
    return has_moved;
  }
  bool is_busy() const override {
    return num_open_ > 0 || words().source.last() >= chunks_.exchange();
  }

 private:
  // An exchange whose operand NICs send from where it is.
  struct InPlace {
    uint64_t exchange;
    size_t num_open = 0;   // chunks under way
    bool is_sent = false;  // all of it
  };

  // Returns the slots to the device that the peer's device has emptied.
  size_t ReturnSlots() {
    size_t count = 0;
    for (uint32_t slot = 0; slot < kChannelSlots; ++slot) {
      if (generations_.at(slot) == 0 || !link().IsFree(slot)) continue;
      Set(words().head.at(slot), std::exchange(generations_.at(slot), 0));
      if (InPlace* const exchange = std::exchange(in_place_of_.at(slot), nullptr)) {
        --exchange->num_open;
      }
      --num_open_;
      ++count;
    }
    if (count > 0) ReturnOperands();
    return count;
  }

  // In their order, which is that of the words.
  void ReturnOperands() {
    for (; !in_place_.empty(); in_place_.pop_front()) {
      const auto [exchange, num_open, is_sent] = in_place_.front();
      if (num_open > 0 || !is_sent) return;
      Set(words().TakenOf(exchange), DeviceNumber(exchange));
    }
  }

  size_t SendNext() {
    if (link().HasResends()) return link().Resend() > 0 ? 1 : 0;
    const std::optional<DeviceChunkInfo> info = chunks_.Next();
    if (!info) return 0;
    const uint32_t slot = SlotOf(info->chunk);
    const uint32_t generation = GenerationOf(info->chunk);
    const std::optional<RouteChoices::Route> route = RouteOf(*info);
    if (!route || !link().IsFree(slot) || !link().HasRoom()) return 0;
    const bool is_in_place = *route == RouteChoices::Route::kZeroCopy;
    if (is_in_place ? !Has(words().ready, DeviceNumber(info->exchange))
                    : !Has(words().tail.at(slot), generation)) {
      return 0;
    }
    std::memcpy(link().header(slot), &*info, sizeof *info);
    generations_.at(slot) = generation;
    ++num_open_;
    if (is_in_place) {
      StartInPlace(*info, chunks_.offset());
    } else {
      link().Start(slot, info->num_bytes);
    }
    link().SendTo(slot, info->num_bytes);
    chunks_.Advance(*info);
    return 1;
  }

  // None while the device's thread has not chosen it.
  std::optional<RouteChoices::Route> RouteOf(const DeviceChunkInfo& info) const {
    if (info.exchange_bytes < pull_bytes()) return RouteChoices::Route::kSlots;
    return words().routes.Find(info.exchange);
  }

  void StartInPlace(const DeviceChunkInfo& info, uint64_t offset) {
    if (offset == 0) in_place_.push_back({.exchange = info.exchange});
    InPlace& exchange = in_place_.back();
    ++exchange.num_open;
    exchange.is_sent = offset + info.num_bytes == info.exchange_bytes;
    const uint32_t slot = SlotOf(info.chunk);
    in_place_of_.at(slot) = &exchange;
    link().StartFrom(slot, operands_->memory(), words().source.PlaceOf(info.exchange) + offset,
                     info.num_bytes);
  }

  std::shared_ptr<verbs::OperandRegion> operands_;  // null: none are known
  std::deque<InPlace> in_place_;
  std::array<uint32_t, kChannelSlots>
      generations_{};  // generations of the slots that are under way
  std::array<InPlace*, kChannelSlots> in_place_of_{};  // null: from our slot
  ChunkCounter chunks_;
};

class VerbsTarget final : public VerbsChannel {
 public:
  VerbsTarget(const ChannelSetup& setup, size_t slot_bytes)
      : VerbsChannel(setup, slot_bytes, /*is_source=*/false) {}

  void Accept(std::string_view answer) override { link().Accept(answer); }

  bool IsProven(Device& device, std::span<const std::byte> proof) override {
    if (!PumpUntil([this] { return link().HasArrivals(); })) return false;
    const verbs::SlotLink::Arrival arrival = link().FirstArrival();
    link().TakeArrival();
    device_slots().Flush(arrival.slot, link().NicOf(arrival));
    const bool is_proven = DeviceChannel::IsProven(device, proof);
    link().Empty(arrival.slot);
    link().SendCredits();
    return is_proven;
  }

 protected:
  bool Move() override { return TakeArrivals() + EmptySlots() > 0; }
  bool is_busy() const override { return num_open_ > 0; }

 private:
  size_t TakeArrivals() {
    size_t count = 0;
    for (; link().HasArrivals(); ++count) {
      const verbs::SlotLink::Arrival arrival = link().FirstArrival();
      link().TakeArrival();
      if (!IsVisible(arrival)) continue;
      const size_t slot = arrival.slot;
      const std::span<const std::byte, sizeof(DeviceChunkInfo)> header(link().arrived_header(slot),
                                                                       sizeof(DeviceChunkInfo));
      const uint64_t chunk = num_arrived_.at(slot)++ * kChannelSlots + slot;
      const DeviceChunkInfo info = ParseDeviceChunkInfo(header, chunk, slot_bytes());
      generations_.at(slot) = GenerationOf(info.chunk);
      ++num_open_;
      // Whoever looks at the logs fails the job.
      if (IsAgreed(info)) Set(words().tail.at(slot), GenerationOf(info.chunk));
    }
    return count;
  }

  bool IsVisible(const verbs::SlotLink::Arrival& arrival) {
    try {
      device_slots().Flush(arrival.slot, link().NicOf(arrival));
      return true;
    } catch (const Error& error) {
      link().Refuse(arrival, error.text());
      return false;
    }
  }

  size_t EmptySlots() {
    size_t count = 0;
    for (uint32_t slot = 0; slot < kChannelSlots; ++slot) {
      if (generations_.at(slot) == 0 || !Has(words().head.at(slot), generations_.at(slot)))
        continue;
      generations_.at(slot) = 0;
      link().Empty(slot);
      --num_open_;
      ++count;
    }
    link().SendCredits();
    return count;
  }

  std::array<uint32_t, kChannelSlots>
      generations_{};  // generations of the slots that the device has not emptied
  std::array<uint64_t, kChannelSlots> num_arrived_{};  // chunks by slot
};

void Check(const ChannelSetup& setup) {
  RefuseSealing(setup.encryption);
  if (setup.same_process) Throw(ErrorCode::kTransport, "both devices are of one process");
  if (setup.messages == nullptr) Throw(ErrorCode::kTransport, "no sockets were connected for it");
}

}  // namespace

std::pair<std::unique_ptr<DeviceChannel>, std::string> MakeVerbsChannel(const ChannelSetup& setup) {
  Check(setup);
  const VerbsOfferInfo info{std::min(setup.slot_bytes, MostBytes(setup))};
  auto channel = std::make_unique<VerbsTarget>(setup, info.slot_bytes);
  std::string offer(reinterpret_cast<const char*>(&info), sizeof info);
  offer += channel->Answer();
  return {std::move(channel), std::move(offer)};
}

std::unique_ptr<DeviceChannel> OpenVerbsChannel(const ChannelSetup& setup, std::string_view offer) {
  Check(setup);
  VerbsOfferInfo info{};
  if (offer.size() < sizeof info) Throw(ErrorCode::kTransport, "the peer's offer is cut");
  std::memcpy(&info, offer.data(), sizeof info);
  offer.remove_prefix(sizeof info);
  CheckSlotBytes(info.slot_bytes);
  const size_t most = MostBytes(setup);
  if (info.slot_bytes > most) {
    Throw(ErrorCode::kTransport, "a NIC here sends ", most, " bytes at once, not ", info.slot_bytes,
          "; set JAXHET__SLOT_BYTES to less");
  }
  return std::make_unique<VerbsSource>(setup, info.slot_bytes, offer);
}

}  // namespace jaxhet
