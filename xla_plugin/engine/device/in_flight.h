#ifndef XLA_PLUGIN_ENGINE_DEVICE_IN_FLIGHT_H_
#define XLA_PLUGIN_ENGINE_DEVICE_IN_FLIGHT_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>

#include "xla_plugin/engine/common/exchange.h"
#include "xla_plugin/engine/device/stream_progress.h"
#include "xla_plugin/engine/device/transfer_plan.h"

namespace jaxhet {

// A transfer that was started.
struct InFlight {
  // The exchange of the transfer.
  struct Whole {
    uint32_t first;  // number of its first transfer
    ExchangeKind kind;
    int64_t plan;
    int64_t index;
    int64_t deadline_ms;
    size_t operand_bytes;
    std::byte poison;
    StreamHandle program;
    bool is_detached = false;  // moves through slots: Done() may follow those of later exchanges
  };
  // The send of the transfer, or the receive.
  struct Side {
    uint64_t number = 0;  // on the channel
    Route route;
    Marks marks{};
  };

  uint32_t number = 0;  // on this rank
  bool is_last = false;
  Whole exchange{};
  DeviceTransfer transfer;
  Side send;
  Side receive;
  bool is_pending = false;      // the receive is on no stream yet
  uint32_t done_parts = 0;      // parts whose Done() was called
  uint32_t done_number = 0;     // 0 until the first
  std::optional<Time> reached;  // by the device, as the watch saw it

  bool is_done() const { return done_parts == transfer.parts; }
};

// The transfers of a rank that are not over, in the order of their starts. The thread that launches
// the program adds them, and the watch removes them.
struct InFlightTransfers {
  void Add(const InFlight& transfer) {
    const std::lock_guard lock(mutex);
    all.push_back(transfer);
  }
  // The mutex is held. Throws PeerError if the transfer was removed.
  InFlight& Find(uint32_t number);

  mutable std::mutex mutex;  // guards the members below; no driver call is made under it
  std::deque<InFlight> all;
  uint32_t dones = 0;  // exchanges whose Done() was called
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_ENGINE_DEVICE_IN_FLIGHT_H_
