#ifndef XLA_PLUGIN_TRANSPORT_PULL_H_
#define XLA_PLUGIN_TRANSPORT_PULL_H_

#include <deque>
#include <memory>

#include "xla_plugin/transport/transport.h"

namespace jaxhet {

// A connection whose receiver copies straight out of the sender's memory. A start announces where
// the sender's bytes lie; the receiver pulls them and answers with the sender's ticket, which frees
// them.
class PullConnection : public Connection {
 public:
  explicit PullConnection(ConnectionHost& host) : host_(host) {}

  std::string Announce(const Transfer& transfer) final;
  void Begin(Transfer& transfer, std::string_view announcement) final;
  void OnMessage(std::span<const std::byte> message) final;
  bool Advance() final;

 protected:
  ConnectionHost& host() { return host_; }

 private:
  struct Pull {
    Transfer* transfer;
    IoList source;  // in the peer's address space
  };

  // Copies what both sides have, or a part of it; returns the bytes, 0 after host().Lost().
  virtual size_t Copy(std::span<const iovec> to, std::span<const iovec> from) = 0;
  // False, after host().Lost(), if the sender may have freed its memory before our last copy.
  virtual bool SourceIsAlive() = 0;

  ConnectionHost& host_;
  std::deque<Pull> pulls_;
};

// Between the ranks of one process (a rank and itself included): plain memory copies.
std::unique_ptr<Connection> OpenLocal(ConnectionHost& host);

}  // namespace jaxhet

#endif  // XLA_PLUGIN_TRANSPORT_PULL_H_
