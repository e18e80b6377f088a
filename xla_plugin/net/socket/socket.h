#ifndef XLA_PLUGIN_NET_SOCKET_SOCKET_H_
#define XLA_PLUGIN_NET_SOCKET_SOCKET_H_

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "xla_plugin/base/fd.h"
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

}  // namespace jaxhet

#endif  // XLA_PLUGIN_NET_SOCKET_SOCKET_H_
