#ifndef XLA_PLUGIN_ENGINE_DEVICE_RANK_H_
#define XLA_PLUGIN_ENGINE_DEVICE_RANK_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "xla_plugin/device/device.h"
#include "xla_plugin/device/stream_work.h"
#include "xla_plugin/engine/exchange.h"
#include "xla_plugin/engine/flight_recorder.h"
#include "xla_plugin/transport/device_channel/device_channel.h"

namespace jaxhet {

// One device's start of an exchange, which is as ExchangeRequest says, with `group_size` blocks.
// The operand and the result are its memory, and stay valid until the work that follows done() on
// `stream` has run.
struct DeviceRequest {
  StreamHandle stream;  // the program's
  ExchangeKind kind = ExchangeKind::kPermute;
  int64_t plan = 0;
  int64_t index = 0;
  int64_t deadline_ms = 0;         // 0: Options::deadline_ms
  std::span<const int64_t> ranks;  // all groups, as GroupOf() reads them; of a permute: pairs
  int64_t group_size = 2;          // at least the members of the largest group
  bool skips_own = false;          // the block of the result that is the rank's own stays as it is
  int64_t part_bytes = 0;          // size of a permute's parts, each with a Done(); 0: one part
  std::span<const std::byte> operand;
  std::span<std::byte> result;
  std::byte poison;  // fills a result that can't arrive
};

// A channel and what this end has done on it.
struct RankChannel {
  std::unique_ptr<DeviceChannel> end;
  std::string_view transport;
  uint64_t exchanges = 0;
  std::atomic<uint64_t> chunks = 0;
  std::atomic<uint64_t> num_bytes = 0;
};

// One rank of this process: its device, its channels, and its exchanges in flight.
//
// An exchange is a list of transfers. In a transfer the rank sends to at most one peer and receives
// from at most one. A group of n ranks has n - 1 transfers, for the distances 1 to n - 1 between
// two members, and one more transfer that copies the rank's own part.
//
// Start() and Done() only put work on streams. The send streams wait for the operand and for
// emptied slots. The receive streams wait for filled slots. The program's stream waits for both at
// Done(). Chunks alternate between the streams, so the work of a stream between two copies costs no
// time. All ranks start exchanges in one order, so streams can't wait for each other in a circle.
// Nothing else holds the program's stream. A result is received when it arrives, even if the
// program has not reached its Done().
//
// Eager messages avoid a hop between streams if both ends share the slots. The program's stream
// sends at Start(), if a slot is known to be empty, and receives at Done(). A receive stream
// receives earlier if the slot is needed again before that.
//
// Pulled exchanges: at Start() the source's stream only signals that the operand is ready, and at
// Done() it waits until the target has read it. (The source does the same if its NIC sends the
// operand from there. The target, which may be on another host, then receives through slots.) An
// exchange may be pulled in parts: the program continues with one while the next arrives. Through
// slots it is complete at the first Done(). The target learns the operand's address from the
// source's launch. The thread that launches the program then puts the receive on its stream, in the
// order of starts. At Done() it waits briefly for that launch before it chooses slots. (Another
// thread could not: a driver call that waits for all streams blocks all others.)
//
// When the job fails, the program's stream is held at the next Done(). Exchanges then end one after
// the other, in the order of their Done(): all streams run to the exchange's end, its result is
// poisoned if it has not arrived, and the program continues to the next Done(). No stream may be
// left waiting: a driver that allocates memory waits for all streams.
class DeviceRank {
 public:
  DeviceRank(int rank, std::unique_ptr<Device> device, size_t eager_bytes);
  ~DeviceRank();
  DeviceRank(const DeviceRank&) = delete;
  DeviceRank& operator=(const DeviceRank&) = delete;

  int rank() const { return rank_; }
  Device& device() { return *device_; }
  // Set-up.
  void AddOutgoing(int target, std::unique_ptr<RankChannel> channel);
  void AddIncoming(int source, std::unique_ptr<RankChannel> channel);
  // Sockets of all channels; see DeviceChannel.
  std::vector<int> SocketFds() const;

  // The peer has launched something else where this rank launches `own`.
  struct Mismatch {
    int peer_rank;
    Launch own;
    Launch theirs;
  };
  // By the thread that launches the program's work. Errors of the device are thrown; after them,
  // and after a mismatch, the rank must be abandoned.
  std::optional<Mismatch> Start(const DeviceRequest& request);
  // Completes the exchange, or its next part if it arrives in parts.
  void Done(StreamHandle stream, int64_t plan, int64_t index);

  // State of the exchanges in flight.
  struct Report {
    struct Late {
      int64_t plan;
      int64_t index;
      int peer_rank;
      bool has_launched;           // the peer, this exchange
      std::optional<Launch> last;  // the peer's latest one, if not
      std::chrono::milliseconds waited;
    };
    size_t in_flight = 0;
    std::optional<Late> late;
    std::optional<Mismatch> mismatch;  // where the peer's launch arrived in a message
    struct Broken {
      int peer_rank;
      std::string why;
    };
    std::optional<Broken> broken;  // a channel to or from that rank
  };
  // By any thread. Records what has started and ended. `wait_budget` holds for a peer that runs the
  // same plan, `first_wait_budget` until then.
  Report Look(std::chrono::milliseconds wait_budget, std::chrono::milliseconds first_wait_budget);

  // Whether all sent bytes are in their targets' slots or on the way there, so that a target can
  // receive them after this process has exited. Targets that have exited don't count.
  bool IsDrained(const std::function<bool(int target)>& is_gone) const;

  // An exchange in flight that waits for the peer.
  struct Wait {
    int rank;
    int peer_rank;
    int64_t plan;
    int64_t index;
    Time since;  // reached by the device; Time::max() if it has not been
  };
  // The oldest with one of `peer_ranks`. By any thread.
  std::optional<Wait> OldestWait(std::span<const int> peer_ranks) const;

  // The job has failed. Nothing starts any more, and the program's stream stops at the next Done()
  // that it comes to. By any thread, for all ranks before the first Abandon().
  void Stop();
  // Ends what is in flight, as above; again for what a thread has started meanwhile. False if the
  // device did not get there in time; the program stays where it is then.
  bool Abandon(std::chrono::milliseconds timeout);

  // Counts of the exchanges so far; times as Look() saw them.
  struct Counts {
    uint64_t started;
    uint64_t completed;
    Clock::duration in_flight_time;  // sum over the completed ones
    uint64_t pulled_bytes;
    uint64_t in_place_bytes;
  };
  Counts counts() const;
  std::deque<FlightRecord> FlightRecords() const;
  // Bytes moved by a channel to or from another rank.
  struct ChannelBytes {
    int peer_rank = 0;
    std::string_view transport;
    uint64_t sent = 0;
    uint64_t received = 0;
  };
  std::vector<ChannelBytes> Bytes() const;

 private:
  using Channels = std::map<int, std::unique_ptr<RankChannel>>;  // by the other rank

  static constexpr std::chrono::microseconds kPause{50};  // between looks at the device
  static constexpr size_t kStreams = 2;
  static_assert(kChannelSlots % kStreams == 0);  // a slot's chunks are all on one stream
  static constexpr size_t kProgram = kStreams;   // the program's stream, as one of them
  static_assert(kTakenWords == kStreams);        // an exchange is pulled by the stream of its word
  // By stream: how many parts of exchanges it had been given with this one; 0 if it has none of it.
  using Marks = std::array<uint32_t, kStreams + 1>;
  using MarkWords = std::array<DeviceWord, kStreams + 1>;

  // Written by the device, but for the first.
  struct Words {
    DeviceWord go_on;    // waited for last at Done(), with its number; kOpen until the job fails
    DeviceWord reached;  // the first transfer of the last exchange that the program has come to
    MarkWords sent;
    MarkWords received;
  };

  // A transfer.
  struct InFlight {
    uint32_t number;  // on this rank
    uint32_t first;   // transfer of its exchange
    bool is_last;
    ExchangeKind kind;
    StreamHandle program;
    int64_t plan;
    int64_t index;
    int64_t deadline_ms;
    int target = -1;
    int source = -1;
    uint64_t outgoing_number = 0;  // on that channel
    uint64_t incoming_number = 0;  // chooses a stream for an own part
    size_t operand_bytes = 0;      // operand of the whole exchange
    std::span<const std::byte> operand;
    bool is_own = false;                  // a copy of the operand
    bool is_pulled = false;               // by its target
    std::optional<uint64_t> first_chunk;  // on the incoming channel, if it comes through slots
    bool is_pending = false;              // the receive is on no stream yet
    bool is_eager = false;                // and comes on the program's, at Done()
    Marks sends{};
    Marks receives{};
    std::span<std::byte> result;
    std::byte poison{};
    size_t part_bytes = 0;        // size of each part but the last, if there are several
    uint32_t parts = 1;           // a pulled exchange has several; Done() is called for each
    uint32_t done_parts = 0;      // parts whose Done() was called
    uint32_t done_number = 0;     // 0 until the first
    std::optional<Time> reached;  // by the device, as Look() saw it

    bool is_done() const { return done_parts == parts; }
  };

  // A receive that is to be put on our streams.
  struct Receipt {
    InFlight exchange;
    Event ready;  // the program has come to its start, or done
  };
  class Works;

  std::vector<InFlight> TransfersOf(const DeviceRequest& request) const;
  InFlight PermuteTransfer(const DeviceRequest& request, InFlight transfer) const;
  std::vector<InFlight> GroupTransfers(const DeviceRequest& request, const InFlight& whole) const;
  void Add(const InFlight& exchange);
  void StartOwn(InFlight& exchange);
  std::optional<Mismatch> StartTransfer(InFlight& exchange);
  void DoneLeg(uint32_t number, StreamWork& program);
  std::optional<Mismatch> Agree(InFlight& exchange);
  void PlanSend(InFlight& exchange, bool is_eager);
  std::vector<InFlight> NumberChunks(InFlight& exchange);
  // Null: no part of it is for the program's stream.
  void Send(const InFlight& exchange, StreamWork* program, EventHandle ready);
  void Receive(const InFlight& exchange, uint64_t first_chunk, StreamWork* program,
               EventHandle ready);
  void Pull(const InFlight& exchange, EventHandle ready);
  void CopyOwn(const InFlight& exchange, EventHandle ready);
  void AwaitTaken(const InFlight& exchange, StreamWork& program);
  Event TakeEvent();
  void ReceiveWhenKnown(Receipt receipt);
  void ReceiveKnown();
  void ReceiveAllUntil(uint32_t number);
  void ReceiveByStreams(InFlight exchange, EventHandle ready);
  std::optional<RouteChoices::Route> RouteOf(const InFlight& exchange) const;
  static uint64_t NumChunks(const RankChannel& channel, size_t num_bytes);
  static bool IsShort(const RankChannel& channel, size_t num_bytes);
  static bool IsFree(const RankChannel& channel, uint64_t chunk);
  static Marks NextMarks(Marks& last, uint64_t first_chunk, uint64_t num_chunks);
  static bool IsByProgram(const Marks& marks) { return marks.at(kProgram) != 0; }
  static bool IsByStreams(Marks marks);
  template <typename Function>
  static void ForEachStream(const Marks& marks, Function function) {
    for (size_t s = 0; s < marks.size(); ++s) {
      if (marks.at(s) != 0) function(s);
    }
  }
  static bool IsOver(const Marks& marks, MarkWords& words);
  bool IsReceived(const InFlight& exchange) const {
    return !exchange.is_pending && IsOver(exchange.receives, words_->received);
  }
  bool IsSent(const InFlight& exchange) const {
    const bool is_untaken = exchange.is_pulled && !exchange.is_done();
    return !is_untaken && IsOver(exchange.sends, words_->sent);
  }
  bool HasReached(const InFlight& exchange) const;
  // At least in its slots.
  bool HasCome(const InFlight& exchange) const;
  bool HasGone(const InFlight& exchange) const;
  std::span<std::byte> MissingOf(const InFlight& exchange) const;
  RankChannel& ChannelOf(Channels& channels, int peer_rank);
  template <typename Passed>
  void WaitForRoom(uint64_t number, Passed passed) const;
  void* AddressOf(const DeviceWord& word) const;
  bool IsComplete(const InFlight& exchange) const {
    return IsReceived(exchange) && IsSent(exchange);
  }
  void RecordReached();
  void RecordCompleted();
  FlightRecord RecordOf(const InFlight& exchange, Time started) const;
  std::optional<Mismatch> FindMismatch(const InFlight& exchange) const;
  std::optional<Report::Broken> FindBroken() const;
  bool OpenUntil(Time limit, const std::function<bool()>& is_over);
  bool RunToTheEnd(const InFlight& exchange, Time limit);
  bool Poison(const InFlight& exchange, std::span<std::byte> missing, Time limit);
  bool IsIdle();
  std::optional<Report::Late> FindLate(const InFlight& exchange,
                                       std::chrono::milliseconds wait_budget,
                                       std::chrono::milliseconds first_wait_budget) const;

  const int rank_;
  const std::unique_ptr<Device> device_;
  PinnedMemory words_memory_;
  Words* words_;
  std::byte* device_words_;
  Channels outgoing_;
  Channels incoming_;
  const size_t eager_bytes_;
  std::array<Stream, kStreams> send_streams_;
  std::array<Stream, kStreams> receive_streams_;
  Stream rescue_stream_;            // for poison
  StreamHandle program_ = nullptr;  // the first program's
  Marks last_sends_{};
  Marks last_receives_{};

  std::deque<Receipt> receipts_;  // in the order of starts
  std::vector<Event> events_;     // events that no receipt uses
  Time gave_up_at_;               // Done() has waited in vain; at first never
  std::atomic<uint64_t> pulled_bytes_ = 0;
  std::atomic<uint64_t> in_place_bytes_ = 0;  // sent by a NIC, or pulled by a target

  std::atomic<bool> stopped_ = false;
  std::atomic<uint64_t> started_ = 0;
  uint32_t last_transfer_ = 0;
  uint32_t last_reached_ = 0;       // the value that will be written
  mutable std::mutex mutex_;        // guards the members below; no driver call is made under it
  std::deque<InFlight> in_flight_;  // in the order of their starts
  uint32_t dones_ = 0;
  uint64_t completed_ = 0;
  Clock::duration in_flight_time_{};
  Time last_completed_;
  FlightRecorder recorder_;
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_ENGINE_DEVICE_RANK_H_
