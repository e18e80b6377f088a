#ifndef XLA_PLUGIN_NET_SOCKET_SOCKET_H_
#define XLA_PLUGIN_NET_SOCKET_SOCKET_H_

#include <sys/uio.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "xla_plugin/base/fd.h"
#include "xla_plugin/base/io_list.h"
#include "xla_plugin/net/connection.h"
#include "xla_plugin/net/seal.h"

namespace jaxhet {

// A connected stream socket that never blocks, polled edge-triggered: it counts as ready from an
// event until a call says EAGAIN. With keys, what is written travels as sealed records.
class Socket final : public Pollable {
 public:
  explicit Socket(Fd fd, SealKeys keys = {});

  int fd() const override { return fd_.get(); }
  bool readable() const { return readable_ || (sealed_ && sealed_->in.has_bytes()); }
  bool writable() const { return writable_; }
  void OnEvents(uint32_t events) override;

  // Both return the bytes moved: 0 if nothing could be moved now or the socket is closed. Read()
  // throws TransportError for a record that was changed.
  size_t Read(std::span<const iovec> entries);
  size_t Write(std::span<const iovec> entries);
  // Sends sealed bytes that could not be sent yet; call it after an event, too.
  void Flush();
  // The kernel has all bytes that Write() has taken.
  bool is_flushed() const { return !sealed_ || sealed_->out.unsent().empty(); }

  // Tells the peer that nothing follows, after what is sealed; reading goes on.
  void ShutdownWrite();
  // Neither reading nor writing is possible any more, and why.
  bool closed() const { return !close_reason_.empty(); }
  const std::string& close_reason() const { return close_reason_; }
  // Why nothing can be written any more; empty while all is well.
  const std::string& send_failure() const {
    return send_failure_.empty() ? close_reason_ : send_failure_;
  }

 private:
  struct Sealed {
    RecordWriter out;
    RecordReader in;
    bool shut_down = false;  // once all is sent
  };

  size_t ReadRaw(std::span<const iovec> entries);
  size_t WriteRaw(std::span<const iovec> entries);
  size_t ReadSealed(std::span<const iovec> entries);
  size_t WriteSealed(std::span<const iovec> entries);
  size_t Moved(ssize_t result, bool& ready, const char* call);

  Fd fd_;
  std::unique_ptr<Sealed> sealed_;  // null: bytes travel as they are
  bool readable_ = true;
  bool writable_ = true;
  std::string close_reason_;
  std::string send_failure_;
};

// Messages on a connection: a MessageInfo, then a body. Fixed width, little-endian; kMessageMagic
// names the version.
static_assert(std::endian::native == std::endian::little);

inline constexpr uint32_t kMessageMagic = 0x3348'584a;  // "JXH3"
inline constexpr uint64_t kMaxBodyBytes = uint64_t{64} << 20;

struct MessageInfo {
  uint32_t magic;
  uint32_t type;  // number that has a meaning for the owner
  uint64_t body_bytes;
};

struct Message {
  uint32_t type;
  std::string_view body;  // until the next call of Next()
};

// Whole messages over the control connection to one peer, or over a lane's. Without a socket it is
// the process's connection to itself: what is sent is received. Never blocks; what can't be sent is
// kept.
class ControlChannel {
 public:
  ControlChannel() = default;  // to ourselves
  explicit ControlChannel(Fd fd, SealKeys keys = {})
      : socket_(std::in_place, std::move(fd), std::move(keys)) {}

  void Send(uint32_t type, std::span<const iovec> body);
  void Send(uint32_t type, std::string_view body = {});
  // Sends what was kept.
  void Flush();
  // Says that nothing follows, after what was kept; later messages are dropped.
  void FinishSending();

  // The next message, if it has arrived. Throws TransportError for other bytes.
  std::optional<Message> Next();

  Socket* socket() { return socket_ ? &*socket_ : nullptr; }
  bool closed() const { return socket_ && socket_->closed(); }

 private:
  std::optional<Message> Parse();
  bool ReadMore();

  std::optional<Socket> socket_;
  std::string unsent_;
  std::string received_;
  size_t parsed_ = 0;  // bytes of received_ that Next() has given out
  bool finished_ = false;
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_NET_SOCKET_SOCKET_H_
