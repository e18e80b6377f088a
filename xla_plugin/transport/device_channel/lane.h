#ifndef XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_LANE_H_
#define XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_LANE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "xla_plugin/base/fd.h"
#include "xla_plugin/net/connection.h"
#include "xla_plugin/net/socket/socket.h"

namespace jaxhet {

class Lane;
class ProxyThread;

// The threads that drive all channels of a rank which devices can't drive alone.
class Proxy {
 public:
  static constexpr size_t kMostThreads = 8;

  Proxy();
  // Ends the threads. Lanes live longer.
  ~Proxy();
  Proxy(const Proxy&) = delete;
  Proxy& operator=(const Proxy&) = delete;

  // Gives the lane to the next of the threads, in turns; starts one more thread if there are fewer
  // than `wanted_threads`. A lane that was added before stays where it is. Any thread may call it.
  void Add(Lane& lane, size_t wanted_threads);

 private:
  std::mutex mutex_;  // guards the members below
  Fd ready_;          // an eventfd that is always ready, to wake threads; none before the first
  std::vector<std::unique_ptr<ProxyThread>> threads_;
  size_t num_lanes_ = 0;
};

// A Connection that a proxy drives, for the channels of both directions between two ranks or for
// one channel.
class Lane final : private ConnectionHost {
 public:
  enum class State {
    kIdle,     // there is nothing to do before an event of a pollable, or Wake()
    kWaiting,  // a device, or a NIC that is polled, comes first
    kMoved,
  };

  // One channel's work; each transfer of it is a chunk. The lane's errors end both directions.
  class Direction {
   public:
    virtual ~Direction() = default;
    // Begins the transfers of chunks that a device has written.
    virtual State Begin([[maybe_unused]] Connection& connection) { return State::kIdle; }
    // For the target: whether the slot of that chunk is empty; and the chunk's transfer.
    virtual bool IsReady([[maybe_unused]] uint64_t chunk) { return false; }
    virtual Transfer& Find(uint64_t chunk);
    // More of the transfer was sent or received.
    virtual void Moved(Transfer& transfer) = 0;
    // A chunk was launched and is not sent.
    virtual bool is_sending() const { return false; }
    virtual void Fail(const Error& error) = 0;
  };

  struct Messages {  // takes the place of the control connection
    Fd fd;
    SealKeys keys;
  };
  using LogFunction = std::function<void(std::string_view what)>;  // for people; on any thread
  using Open = std::function<std::unique_ptr<Connection>(ConnectionHost& host)>;
  Lane(std::optional<Messages> messages, LogFunction log, const Open& open);

  Connection& connection() { return *connection_; }
  // Throws for the offer of another version.
  void Accept(std::string_view offer);
  // Returns the same ones each time.
  std::vector<Pollable*> Pollables();
  // Only the proxy's thread calls it, and handles events of the pollables. Does not block or throw.
  State Advance();
  // Says that the lane may have something to do. Any thread may call it.
  void Wake();

  void SetOutgoing(Direction& direction);
  void SetIncoming(Direction& direction);
  // Ends all moving, in both directions.
  void Stop();
  // Paths to the peer that failed and were left.
  uint64_t num_path_failures() const { return num_path_failures_; }

 private:
  friend class Proxy;
  friend class ProxyThread;

  static constexpr uint32_t kMessage = 0;  // the only type

  void TakeMessages();
  void Send(std::span<const iovec> message) override {
    if (messages_) messages_->Send(kMessage, message);
  }
  void Log(std::string_view what) override {
    ++num_path_failures_;
    log_(what);
  }
  void Lost(std::string_view why) override { lost_ = why; }
  Transfer& Find(uint64_t ticket) override { return incoming_->Find(ticket); }
  bool IsReady(uint64_t ticket) override;
  void Sent(Transfer& transfer, size_t num_bytes) override;
  void Received(Transfer& transfer, size_t num_bytes) override;

  std::atomic<bool> is_due_ = true;
  std::atomic<ProxyThread*> thread_ = nullptr;
  const LogFunction log_;
  std::optional<ControlChannel> messages_;  // none: the ends send each other none
  std::unique_ptr<Connection> connection_;
  std::mutex mutex_;
  bool is_over_ = false;           // under mutex_, like the rest
  Direction* outgoing_ = nullptr;  // null: not settled, or by another transport
  Direction* incoming_ = nullptr;
  std::atomic<uint64_t> num_path_failures_ = 0;
  std::string lost_;  // why the connection can't go on
  bool has_moved_ = false;
  bool is_stalled_ = false;  // a chunk waits for its slot
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_LANE_H_
