#include "xla_plugin/transport/relay.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "xla_plugin/base/error.h"
#include "xla_plugin/base/fd.h"
#include "xla_plugin/base/thread.h"

namespace jaxhet {
namespace {

constexpr size_t kBufferBytes = 64UL << 10;
constexpr std::string_view kRequestEnd = "\r\n\r\n";

using SharedFd = std::shared_ptr<const Fd>;

SharedFd Share(int fd) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  return std::make_shared<const Fd>(fd);
}

// A socket that listens on a free port of the loopback interface, and the port.
std::pair<SharedFd, int> Listen() {
  Fd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd) ThrowErrno("socket");
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  if (bind(fd.get(), generic, length) != 0) ThrowErrno("bind");
  if (listen(fd.get(), SOMAXCONN) != 0) ThrowErrno("listen");
  if (getsockname(fd.get(), generic, &length) != 0) ThrowErrno("getsockname");
  return {std::make_shared<const Fd>(std::move(fd)), ntohs(address.sin_port)};
}

// Null if the service does not answer.
SharedFd Connect(const std::string& host, const std::string& port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), port.c_str(), &hints, &found) != 0) return nullptr;
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> all(found, &freeaddrinfo);
  for (const addrinfo* each = found; each != nullptr; each = each->ai_next) {
    Fd fd(socket(each->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (fd && connect(fd.get(), each->ai_addr, each->ai_addrlen) == 0) return Share(fd.Release());
  }
  return nullptr;
}

// Returns the number of bytes that were received; 0: the connection has ended.
size_t Receive(int fd, char* data, size_t capacity) {
  for (;;) {
    const ssize_t count = recv(fd, data, capacity, 0);
    if (count >= 0) return static_cast<size_t>(count);
    if (errno != EINTR) return 0;
  }
}

// Returns whether all bytes were sent; false: the connection has ended.
bool Send(int fd, std::string_view data) {
  while (!data.empty()) {
    const ssize_t count = send(fd, data.data(), data.size(), MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return false;
    data.remove_prefix(static_cast<size_t>(count));
  }
  return true;
}

// Reads the client's request, which ends with an empty line, and accepts it.
// Returns false if the client has left.
bool AcceptRequest(int client) {
  std::string end(kRequestEnd.size(), '\0');  // the last bytes that were read
  while (end != kRequestEnd) {
    char byte = 0;
    if (Receive(client, &byte, 1) == 0) return false;
    end = end.substr(1) + byte;
  }
  return Send(client, "HTTP/1.1 200 OK\r\n\r\n");
}

// Moves bytes until one of the connections ends.
void Pump(int from, int to) {
  std::array<char, kBufferBytes> buffer{};
  for (;;) {
    const size_t received = Receive(from, buffer.data(), buffer.size());
    if (received == 0 || !Send(to, {buffer.data(), received})) return;
  }
}

}  // namespace

// The open sockets. The threads keep a socket's number from being reused while they wait in a call.
class Relay::Sockets {
 public:
  // Returns whether the socket stays open until `ShutDown`; false: that was called before.
  bool Keep(SharedFd fd) {
    const std::scoped_lock lock(mutex_);
    if (!is_shut_down_) all_.push_back(std::move(fd));
    return !is_shut_down_;
  }

  void ShutDown() {
    const std::scoped_lock lock(mutex_);
    is_shut_down_ = true;
    for (const SharedFd& fd : all_) shutdown(fd->get(), SHUT_RDWR);
    all_.clear();
  }

  // Serves one client: both directions, the client's on this thread.
  void Serve(const SharedFd& client, const std::string& host, const std::string& port) {
    const SharedFd service = Connect(host, port);
    if (!service || !Keep(service) || !AcceptRequest(client->get())) return;
    StartThread("jaxhet-relay", [client, service] {
      Pump(service->get(), client->get());
    }).detach();
    Pump(client->get(), service->get());
    shutdown(service->get(), SHUT_RDWR);
  }

 private:
  std::mutex mutex_;
  std::vector<SharedFd> all_;
  bool is_shut_down_ = false;
};

Relay::Relay(const std::string& host, const std::string& port)
    : sockets_(std::make_shared<Sockets>()) {
  auto [listener, number] = Listen();
  port_ = number;
  sockets_->Keep(listener);
  StartThread("jaxhet-relay", [sockets = sockets_, listener, host, port] {
    for (;;) {
      const int fd = accept4(listener->get(), nullptr, nullptr, SOCK_CLOEXEC);
      if (fd < 0 && (errno == EINTR || errno == ECONNABORTED)) continue;
      if (fd < 0) return;
      const SharedFd client = Share(fd);
      if (!sockets->Keep(client)) return;
      StartThread("jaxhet-relay", [sockets, client, host, port] {
        sockets->Serve(client, host, port);
      }).detach();
    }
  }).detach();
}

void Relay::Close() { sockets_->ShutDown(); }

}  // namespace jaxhet
