#ifndef XLA_PLUGIN_ENGINE_CONTROL_PEER_H_
#define XLA_PLUGIN_ENGINE_CONTROL_PEER_H_

#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "xla_plugin/engine/common/exchange.h"
#include "xla_plugin/engine/common/plans.h"
#include "xla_plugin/engine/common/wire.h"
#include "xla_plugin/net/socket/control_channel.h"
#include "xla_plugin/transport/transport.h"

namespace jaxhet {

struct PeerSpec {
  int process = 0;
  std::string description;  // for people: host, pid
  Fd control;               // connected and authenticated, like the data sockets
  std::vector<Fd> data;
  bool same_host = false;
  // Allowed between processes; none: only control is connected.
  std::vector<std::string> transports;
  std::vector<std::string> device_transports;  // allowed between devices
  // Transports between processes that were refused, and why.
  std::map<std::string, std::string> refused;
  std::vector<SealKeys> keys;  // for `control` and each of `data`, if the job encrypts
};

// Bytes to and from a process by one transport.
struct PeerCounts {
  int process = 0;
  std::string transport;
  uint64_t bytes_sent = 0;
  uint64_t bytes_received = 0;
  uint64_t waited_us = 0;
  uint64_t path_failures = 0;
};

class Peer;

// Receives the reports of the connections to peers.
class PeerEvents {
 public:
  virtual ~PeerEvents() = default;
  // Throws TransportError if this process and `peer` have no open transfer of this ticket.
  virtual Transfer& FindTransfer(const Peer& peer, uint64_t ticket) = 0;
  // Bytes of the transfer have moved.
  virtual void Moved(Peer& peer, Transfer& transfer) = 0;
  // The path to the peer works differently from now on.
  virtual void PathChanged(const Peer& peer, std::string_view what) = 0;
};

// Another process of the job, or this one, as the engine sees it.
class Peer final : public ConnectionHost {
 public:
  Peer(PeerEvents& events, int its_process, ControlChannel its_channel)
      : process(its_process), channel(std::move(its_channel)), events_(events) {}

  void Send(std::span<const iovec> message) override {
    channel.Send(MessageType::kTransport, message);
  }
  Transfer& Find(uint64_t ticket) override { return events_.FindTransfer(*this, ticket); }
  void Sent(Transfer& transfer, size_t num_bytes) override;
  void Received(Transfer& transfer, size_t num_bytes) override;
  void Log(std::string_view what) override;
  void Lost(std::string_view why) override {
    if (lost.empty()) lost = why;
  }

  // Tells the peer why nothing follows.
  void SayFailure(const Error& error, int own_process);
  std::set<Pollable*> Pollables();

  const int process;
  bool same_host = true;
  std::vector<std::string> device_transports;  // allowed ones
  ControlChannel channel;
  std::string transport;  // name of the connection's transport; empty: it moves no data
  std::vector<Refusal> refusals;
  std::unique_ptr<Connection> connection;

  Plans plans;                   // plans that the peer has sent
  std::set<int64_t> plans_sent;  // to it
  struct LastStart {
    StartInfo info;
    Time time;
  };
  std::map<int, LastStart> last_starts;  // by rank
  Time last_heard;
  std::string lost;   // why the path to it is broken
  bool left = false;  // it has said goodbye
  uint64_t bytes_sent = 0;
  uint64_t bytes_received = 0;
  Clock::duration waited{};    // sum of own transfers' waits for the peer's starts
  uint64_t path_failures = 0;  // after which the path to it works differently

 private:
  PeerEvents& events_;
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_ENGINE_CONTROL_PEER_H_
