#ifndef XLA_PLUGIN_NET_CONNECTION_H_
#define XLA_PLUGIN_NET_CONNECTION_H_

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"
#include "xla_plugin/base/io_list.h"

namespace jaxhet {

// A file descriptor that the engine polls, edge-triggered. All calls come from the thread that owns
// the engine at the moment.
class Pollable {
 public:
  virtual int fd() const = 0;
  // Takes note of an epoll or poll event; does not throw.
  virtual void OnEvents(uint32_t events) = 0;

 protected:
  ~Pollable() = default;
};

inline constexpr std::string_view kBytesTwice = "it sent bytes of a transfer twice";

// Bytes that one exchange moves between one rank of ours and one other rank, both ways. The engine
// keeps it, and the memory it names, until both ways are done or the engine has failed.
struct Transfer {
  IoList send;
  IoList receive;
  size_t sent = 0;                    // bytes of `send` that we need not keep any more
  size_t received = 0;                // bytes of `receive` that are in place
  std::map<size_t, size_t> reserved;  // chunks of `receive` that have begun to arrive, where any
                                      // order is possible, from offset to end. None overlap, so
                                      // that `received` counts no byte twice.
  uint64_t ticket = 0;                // names this transfer in the peer's messages to us
  uint64_t peer_ticket = 0;           // names the peer's transfer in ours

  bool IsDone() const { return sent == send.num_bytes() && received == receive.num_bytes(); }
  // A chunk begins to arrive. Throws TransportError if it is empty, lies outside of `receive`, or
  // overlaps another one.
  void Reserve(size_t offset, size_t num_bytes) {
    if (!InBounds(offset, num_bytes, receive.num_bytes())) {
      Throw(ErrorCode::kTransport, "a chunk of ", num_bytes, " bytes at ", offset,
            " lies outside of the transfer");
    }
    const auto next = reserved.lower_bound(offset);
    const bool is_free = num_bytes > 0 &&
                         (next == reserved.end() || next->first >= offset + num_bytes) &&
                         (next == reserved.begin() || std::prev(next)->second <= offset);
    if (!is_free) Throw(ErrorCode::kTransport, kBytesTwice);
    reserved.emplace_hint(next, offset, offset + num_bytes);
  }
};

// Interface of a connection's owner, for the connection.
class ConnectionHost {
 public:
  virtual ~ConnectionHost() = default;
  // Hands `message` to the OnMessage of the peer's end, in order.
  virtual void Send(std::span<const iovec> message) = 0;
  // Tells people that the path to the peer works differently from now on.
  virtual void Log(std::string_view what) = 0;
  // The path broke. The engine fails, with the reason that the peer gives if it gives one.
  virtual void Lost(std::string_view why) = 0;
  // The transfer that the peer named; throws TransportError if it does not exist.
  virtual Transfer& Find(uint64_t ticket) = 0;
  // Whether bytes of that transfer can be received now; if not, the path asks again.
  virtual bool IsReady([[maybe_unused]] uint64_t ticket) { return true; }
  // Counts progress. The transfer may be gone when these return.
  virtual void Sent(Transfer& transfer, size_t num_bytes) = 0;
  virtual void Received(Transfer& transfer, size_t num_bytes) = 0;
};

// Our end of a path to one peer. Only the thread that holds its owner calls it. No function blocks;
// errors are thrown.
class Connection {
 public:
  virtual ~Connection() = default;

  // Set-up: what the peer's Accept() needs to know. Comes before Accept().
  virtual std::string Offer() { return {}; }
  // Set-up: proves that the path works or throws with the reason.
  virtual void Accept([[maybe_unused]] std::string_view offer) {}
  // Objects to poll: an event is followed by Advance(). Connections may share some.
  virtual std::vector<Pollable*> Pollables() { return {}; }

  // Announcement of `transfer` for the peer's Begin(); it travels with our start.
  virtual std::string Announce([[maybe_unused]] const Transfer& transfer) { return {}; }
  // Both sides have started: moves the remaining bytes of both ways (no progress is made before
  // Advance).
  virtual void Begin(Transfer& transfer, std::string_view announcement) = 0;
  virtual void OnMessage(std::span<const std::byte> message) = 0;
  // Moves about kSliceBytes at most. True if there is more to do at once, false if an event must
  // come first.
  virtual bool Advance() = 0;

  // Once both offers are accepted: whether the ends send each other messages.
  virtual bool HasMessages() const { return true; }
  // Whether the path ended while a chunk was under way.
  virtual bool HasBroken() const { return false; }
  // The owner ends: nobody, and no NIC, reads or writes bytes of transfers any more.
  virtual void Kill() {}
};

// Bytes moved between two looks at the control connections: 0.1 to 1 ms.
inline constexpr size_t kSliceBytes = size_t{1} << 20;

}  // namespace jaxhet

#endif  // XLA_PLUGIN_NET_CONNECTION_H_
