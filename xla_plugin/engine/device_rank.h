#ifndef XLA_PLUGIN_ENGINE_DEVICE_RANK_H_
#define XLA_PLUGIN_ENGINE_DEVICE_RANK_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "xla_plugin/device/device.h"
#include "xla_plugin/engine/exchange.h"
#include "xla_plugin/transport/ring/ring.h"

namespace jaxhet {

// One device's start of a permute. The operand and the result are its memory, and stay valid until
// the work that follows done() on `stream` has run.
struct DeviceRequest {
  StreamHandle stream;  // the program's
  int64_t plan = 0;
  int64_t index = 0;
  int64_t deadline_ms = 0;  // 0: Options::deadline_ms
  std::vector<Pair> pairs;  // see ExchangeRequest
  std::span<const std::byte> operand;
  std::span<std::byte> result;
  std::byte poison;  // what the result is filled with if it can't come
};

// A ring and what this end has done on it.
struct RankRing {
  std::unique_ptr<RingEnd> end;
  std::string_view transport;
  uint64_t exchanges = 0;
  uint64_t chunks = 0;
  uint64_t num_bytes = 0;
};

// One rank of this process: its device, its rings, and its exchanges in flight.
//
// Start() and Done() only put work on streams: the send stream waits for the operand and for
// emptied slots, the receive stream for filled ones, and the program's stream, at Done(), for both.
// All ranks start in one order, so that the streams can't wait for each other in a circle. The
// program's stream is held by nothing else, and a result is received as it comes, whether or not
// the program has reached its Done().
class DeviceRank {
 public:
  DeviceRank(int rank, std::unique_ptr<Device> device);
  ~DeviceRank();
  DeviceRank(const DeviceRank&) = delete;
  DeviceRank& operator=(const DeviceRank&) = delete;

  int rank() const { return rank_; }
  Device& device() { return *device_; }
  // Set-up.
  void AddOutgoing(int target, RankRing ring) { outgoing_[target] = std::move(ring); }
  void AddIncoming(int source, RankRing ring) { incoming_[source] = std::move(ring); }

  // The peer has launched something else where this rank launches `own`.
  struct Mismatch {
    int peer_rank;
    Launch own;
    Launch theirs;
  };
  // By the thread that launches the program's work. A mismatch: nothing was started. Errors of the
  // device are thrown; either way the rank must be abandoned then.
  std::optional<Mismatch> Start(const DeviceRequest& request);
  void Done(StreamHandle stream, int64_t plan, int64_t index);

  // What a look at the exchanges in flight finds.
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
    uint64_t completed = 0;  // since the last look
    std::optional<Late> late;
    std::optional<Mismatch> mismatch;  // where the peer's launch came by a message
  };
  // By the watch. Throws what has failed. `patience` is for a peer that runs the same plan,
  // `first_patience` until then.
  Report Look(std::chrono::milliseconds patience, std::chrono::milliseconds first_patience);

  // Nothing starts any more, from now on.
  void Stop() { stopped_ = true; }
  // After Stop(), by any thread: ends all exchanges in flight, without the peers. Their results are
  // poisoned before the program's stream can go on. False if the device did not get there in time.
  bool Abandon(std::chrono::milliseconds timeout);

  uint64_t started() const { return started_; }
  // (transport, sent, received) of each ring.
  std::map<std::string_view, std::pair<uint64_t, uint64_t>> Bytes() const;

 private:
  struct InFlight {
    DeviceRequest request;
    int target = -1;
    int source = -1;
    uint64_t outgoing_number = 0;  // of the exchange on that ring
    uint64_t incoming_number = 0;
    Event ready;  // the program has reached the start
    Event sent;
    Event arrived;  // all chunks were copied, but for the gate
    Event received;
    bool is_done = false;  // Done() was called
    std::optional<Time> reached;
  };

  std::optional<Mismatch> Agree(InFlight& exchange, const Launch& launch);
  RankRing& RingTo(int target);
  RankRing& RingFrom(int source);
  RankRing& RingOf(std::map<int, RankRing>& rings, int peer_rank);
  void Send(RankRing& ring, std::span<const std::byte> operand);
  void Receive(RankRing& ring, InFlight& exchange);
  void WaitForRoom(const LaunchLog& peer, uint64_t number) const;
  Event TakeEvent();
  bool IsComplete(const InFlight& exchange);
  std::optional<Mismatch> FindMismatch(const InFlight& exchange) const;
  void CheckRings() const;
  std::optional<Report::Late> FindLate(InFlight& exchange, std::chrono::milliseconds patience,
                                       std::chrono::milliseconds first_patience);
  void Poison(InFlight& exchange, Time limit);

  const int rank_;
  const std::unique_ptr<Device> device_;
  Stream send_stream_;
  Stream receive_stream_;
  Stream rescue_stream_;              // for what must run while the others are held
  std::map<int, RankRing> outgoing_;  // by target
  std::map<int, RankRing> incoming_;  // by source

  std::atomic<bool> stopped_ = false;
  std::atomic<uint64_t> started_ = 0;
  mutable std::mutex mutex_;        // of what follows, and of the rings' counts
  std::deque<InFlight> in_flight_;  // in the order of their starts
  std::vector<Event> events_;       // free ones
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_ENGINE_DEVICE_RANK_H_
