#include "xla_plugin/transport/device_channel/sockets.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <cerrno>

#include "xla_plugin/base/error.h"

namespace jaxhet {

Fd BlockingCopy(const Fd& socket) {
  Fd copy(fcntl(socket.get(), F_DUPFD_CLOEXEC, 0));
  const int flags = copy ? fcntl(copy.get(), F_GETFL) : -1;
  if (flags < 0 || fcntl(copy.get(), F_SETFL, flags & ~O_NONBLOCK) < 0) ThrowErrno("fcntl");
  return copy;
}

void SendAll(const Fd& socket, const void* from, size_t num_bytes, int flags) {
  const auto* bytes = static_cast<const std::byte*>(from);
  while (num_bytes > 0) {
    const ssize_t done = send(socket.get(), bytes, num_bytes, MSG_NOSIGNAL | flags);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) ThrowErrno("send");
    bytes += done;
    num_bytes -= static_cast<size_t>(done);
  }
}

}  // namespace jaxhet
