#ifndef XLA_PLUGIN_ENGINE_DEVICE_TRANSFER_RUNNER_H_
#define XLA_PLUGIN_ENGINE_DEVICE_TRANSFER_RUNNER_H_

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "xla_plugin/device/device.h"
#include "xla_plugin/engine/device/in_flight.h"
#include "xla_plugin/engine/device/rank_channels.h"

namespace jaxhet {

// Work for a stream, which writes and waits for values in as few calls as it can. Flush() at the
// end.
class StreamWork {
 public:
  StreamWork(Device& device, StreamHandle stream) : device_(device), stream_(stream) {}

  StreamHandle stream() const { return stream_; }
  void Write(void* address, uint32_t value) {
    values_.push_back({StreamValue::Kind::kWrite, address, value});
  }
  // A write may be invisible until the call that holds it is over: the same call must not wait for
  // it, not even by way of a peer.
  void Wait(void* address, uint32_t value) {
    if (!values_.empty() && values_.back().kind == StreamValue::Kind::kWrite) Flush();
    values_.push_back({StreamValue::Kind::kWait, address, value});
  }
  void WaitEvent(EventHandle event) {
    Flush();
    device_.WaitEvent(stream_, event);
  }
  void Copy(void* to, const void* from, size_t num_bytes) {
    Flush();
    device_.Copy(stream_, to, from, num_bytes);
  }
  void Flush() {
    if (!values_.empty()) device_.Values(stream_, values_);
    values_.clear();
  }

 private:
  Device& device_;
  StreamHandle stream_;
  std::vector<StreamValue> values_;
};

// Puts the copies of planned transfers on streams, and the words around them. It decides nothing:
// a transfer's routes and marks say which streams do what.
//
// The send streams wait for the operand and for emptied slots. The receive streams wait for filled
// slots. Chunks alternate between the streams, so the work of a stream between two copies costs no
// time.
//
// A write or a wait takes a stream 1 to 2 µs (H100), an event next to nothing. So other streams
// write and wait for the program's stream, and events join it to them.
class TransferRunner {
 public:
  TransferRunner(Device& device, const StreamProgress& sent, const StreamProgress& received);

  // An event at this point of the stream.
  Event Record(StreamHandle stream);
  // The event is waited for by all that need it; null is ignored.
  void Recycle(Event event);

  // Work for a stream that only writes what the program has come to, after `ready`. The caller
  // flushes it.
  StreamWork Announcement(EventHandle ready);
  // Tells the target that it can read the operand.
  void OfferOperand(const InFlight& transfer, RankChannel& channel, StreamWork& announcement);
  // Sends through slots, after `ready` or on the program's stream, which the caller flushes.
  void Send(const InFlight& transfer, RankChannel& channel, StreamWork* program, EventHandle ready);
  void Receive(const InFlight& transfer, RankChannel& channel, StreamWork* program,
               EventHandle ready);
  // Reads the source's operand.
  void Get(const InFlight& transfer, RankChannel& channel, EventHandle ready);
  // Work for a stream that waits in the program's place. Flush() it, then have the program's stream
  // Follow() it.
  StreamWork DoneWork() { return {device_, done_stream_.get()}; }
  void Follow(StreamHandle program);

  bool IsIdleWithin(std::chrono::milliseconds timeout);
  // Ends the streams, without waiting for them.
  void DropStreams();

  uint64_t read_bytes() const { return read_bytes_; }
  uint64_t offered_bytes() const { return offered_bytes_; }

 private:
  class Works;
  using Streams = std::array<Stream, kStreams>;

  bool IsIdle();

  Device& device_;
  const StreamProgress& sent_;
  const StreamProgress& received_;
  Streams send_streams_;
  Streams receive_streams_;
  Stream announce_stream_;
  Stream done_stream_;
  std::vector<Event> events_;  // events that nothing uses
  std::atomic<uint64_t> read_bytes_ = 0;
  std::atomic<uint64_t> offered_bytes_ = 0;  // read by targets
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_ENGINE_DEVICE_TRANSFER_RUNNER_H_
