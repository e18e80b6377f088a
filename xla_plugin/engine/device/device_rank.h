#ifndef XLA_PLUGIN_ENGINE_DEVICE_DEVICE_RANK_H_
#define XLA_PLUGIN_ENGINE_DEVICE_DEVICE_RANK_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "xla_plugin/device/device.h"
#include "xla_plugin/engine/device/device_watch.h"
#include "xla_plugin/engine/device/in_flight.h"
#include "xla_plugin/engine/device/rank_channels.h"
#include "xla_plugin/engine/device/transfer_runner.h"
#include "xla_plugin/transport/device_channel/lane.h"

namespace jaxhet {

// One rank of this process: its device, its channels, and its exchanges in flight. It has a plan
// made of each exchange, chooses the routes that depend on the channels' state, and gives the
// transfers to a runner.
//
// Start() and Done() only put work on streams. At Done() a stream of ours waits for sends and
// receives, and the program's stream for that one. All ranks start exchanges in one order, so
// streams can't wait for each other in a circle. Nothing else holds the program's stream. A result
// is received when it arrives, even if the program has not reached its Done().
//
// Eager messages avoid a hop between streams if both ends share the slots. The program's stream
// sends at Start(), if a slot is known to be empty, and receives at Done(). A receive stream
// receives earlier if the slot is needed again before that.
//
// Zero-copy: at Start() the source only signals that the operand is ready, and at Done()
// it waits until the target has read it. An exchange may be read in parts: the program continues
// with one while the next arrives. Through slots it is complete at the first Done(). The target
// learns the operand's address from the source's launch. The thread that launches the program then
// puts the receive on its stream, in the order of starts. At Done() it waits briefly for that
// launch before it chooses slots. (Another thread could not: a driver call that waits for all
// streams blocks all others.)
class DeviceRank {
 public:
  DeviceRank(int rank, std::unique_ptr<Device> device, size_t eager_bytes);
  ~DeviceRank();
  DeviceRank(const DeviceRank&) = delete;
  DeviceRank& operator=(const DeviceRank&) = delete;

  int rank() const { return rank_; }
  Device& device() { return *device_; }
  RankChannels& channels() { return channels_; }
  Proxy& proxy() { return proxy_; }
  // Any thread may use it.
  DeviceWatch& watch() { return watch_; }

  // Called by the thread that launches the program's work. Throws errors of the device. After an
  // error or a mismatch the rank must be abandoned.
  std::optional<LaunchMismatch> Start(const DeviceRequest& request);
  // Completes the exchange, or its next part if it arrives in parts.
  void Done(StreamHandle stream, int64_t plan, int64_t index);

  // Adds the counts of this rank; times are as the watch saw them.
  void AddTo(std::map<std::string, uint64_t>& stats) const;

 private:
  // A transfer at its Done().
  struct AtDone {
    InFlight transfer;
    bool is_received;  // now, by the program's stream
  };

  std::optional<LaunchMismatch> StartTransfer(InFlight& transfer);
  void Launch(const InFlight& transfer, const std::vector<InFlight>& overdue);
  void Announce(const InFlight& transfer, EventHandle ready);
  std::optional<LaunchMismatch> AgreeWithTarget(InFlight& transfer);
  std::optional<LaunchMismatch> AgreeWithSource(InFlight& transfer);
  template <typename Passed>
  void WaitForRoom(const LaunchLog& log, uint64_t number, Passed passed) const;
  Route ChooseSend(const InFlight& transfer, bool may_be_eager) const;
  Marks SendMarks(const InFlight& transfer);

  // Receives that are to be put on our streams, in the order of their starts, as soon as both ends
  // have chosen the route.
  struct Receipt {
    InFlight transfer;
    Event ready;
  };
  // Sets the route of the receive and numbers its chunks, if the ends have chosen. Returns the
  // eager messages that must be received before, because their slots are needed.
  std::vector<InFlight> ChooseReceive(InFlight& transfer, bool may_be_eager);
  std::vector<InFlight> TakeOverdue(int source, uint64_t end);
  // `ready`: event at the program's start or done of the transfer.
  void AddReceipt(const InFlight& transfer, Event ready);
  void ReceiveKnown();
  // Receives all until this transfer. Exchanges that their sources have not launched by the end of
  // the wait budget arrive through slots.
  void ReceiveUntil(uint32_t number);
  // Puts one receive, whose route is chosen, on our streams.
  void Receive(const InFlight& transfer, EventHandle ready);

  void DoneTransfer(uint32_t number, StreamHandle program, StreamWork& work);
  void ReceiveElsewhere(uint32_t number, StreamHandle program);
  AtDone CountDone(uint32_t number);
  void AwaitMarks(const Marks& marks, const StreamProgress& progress, StreamWork& work) const;

  const int rank_;
  const std::unique_ptr<Device> device_;
  DeviceWords<RankWords> words_;
  RankChannels channels_;
  Proxy proxy_;
  const size_t eager_bytes_;
  StreamProgress sent_;
  StreamProgress received_;
  InFlightTransfers transfers_;
  DeviceWatch watch_;
  TransferRunner runner_;

  // Members of the thread that launches.
  StreamHandle program_ = nullptr;  // the first program's
  uint32_t last_transfer_ = 0;
  uint32_t last_reached_ = 0;  // the value that will be written
  std::deque<Receipt> receipts_;
  Time gave_up_at_;  // ReceiveUntil() has waited in vain; at first never

  std::atomic<uint64_t> started_ = 0;
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_ENGINE_DEVICE_DEVICE_RANK_H_
