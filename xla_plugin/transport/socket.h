#ifndef XLA_PLUGIN_TRANSPORT_SOCKET_H_
#define XLA_PLUGIN_TRANSPORT_SOCKET_H_

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "xla_plugin/base/fd.h"
#include "xla_plugin/transport/pollable.h"

namespace jaxhet {

// A connected stream socket that never blocks, polled edge-triggered: it counts as ready from an
// event until a call says EAGAIN.
class Socket final : public Pollable {
 public:
  explicit Socket(Fd fd);

  int fd() const override { return fd_.get(); }
  bool readable() const { return readable_; }
  bool writable() const { return writable_; }
  void OnEvents(uint32_t events) override;

  // Both return the bytes moved: 0 if nothing could be moved now or the socket is closed.
  size_t Read(std::span<const iovec> pieces);
  size_t Write(std::span<const iovec> pieces);

  // Tells the peer that nothing follows; reading goes on.
  void ShutdownWrite();
  // Neither reading nor writing is possible any more, and why.
  bool closed() const { return !close_reason_.empty(); }
  const std::string& close_reason() const { return close_reason_; }

 private:
  size_t Moved(ssize_t result, bool& ready, const char* call);

  Fd fd_;
  bool readable_ = true;
  bool writable_ = true;
  std::string close_reason_;
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_TRANSPORT_SOCKET_H_
