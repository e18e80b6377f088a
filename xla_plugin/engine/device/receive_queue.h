#ifndef XLA_PLUGIN_ENGINE_DEVICE_RECEIVE_QUEUE_H_
#define XLA_PLUGIN_ENGINE_DEVICE_RECEIVE_QUEUE_H_

#include <cstdint>
#include <deque>
#include <vector>

#include "xla_plugin/device/device.h"
#include "xla_plugin/engine/device/device_rescue.h"
#include "xla_plugin/engine/device/in_flight.h"
#include "xla_plugin/engine/device/rank_channels.h"
#include "xla_plugin/engine/device/stream_progress.h"
#include "xla_plugin/engine/device/transfer_runner.h"

namespace jaxhet {

// Receives that are to be put on our streams, in the order of their starts, as soon as both ends
// have chosen the route. Only the thread that launches the program's work calls it.
class ReceiveQueue {
 public:
  ReceiveQueue(const RankChannels& channels, InFlightTransfers& transfers, StreamProgress& received,
               const DeviceRescue& rescue, TransferRunner& runner)
      : channels_(channels),
        transfers_(transfers),
        received_(received),
        rescue_(rescue),
        runner_(runner) {}

  bool empty() const { return receipts_.empty(); }
  // Sets the route of the receive and numbers its chunks, if the ends have chosen. Returns the
  // eager messages that must be received before, because their slots are needed.
  std::vector<InFlight> Choose(InFlight& transfer, bool may_be_eager);
  // `ready`: event at the program's start or done of the transfer.
  void Add(const InFlight& transfer, Event ready);
  // Receives all until this transfer. Exchanges that their sources have not launched by the end of
  // the wait budget arrive through slots.
  void ReceiveUntil(uint32_t number);
  // Puts one receive, whose route is chosen, on our streams.
  void Receive(const InFlight& transfer, EventHandle ready);

 private:
  struct Receipt {
    InFlight transfer;
    Event ready;
  };

  void ReceiveKnown();
  std::vector<InFlight> TakeOverdue(int source, uint64_t end);

  const RankChannels& channels_;
  InFlightTransfers& transfers_;
  StreamProgress& received_;
  const DeviceRescue& rescue_;
  TransferRunner& runner_;
  std::deque<Receipt> receipts_;
  Time gave_up_at_;  // ReceiveUntil() has waited in vain; at first never
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_ENGINE_DEVICE_RECEIVE_QUEUE_H_
