#ifndef XLA_PLUGIN_ENGINE_ENGINE_H_
#define XLA_PLUGIN_ENGINE_ENGINE_H_

#include <sys/epoll.h>
#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "xla_plugin/base/error.h"
#include "xla_plugin/base/fd.h"
#include "xla_plugin/engine/common/exchange.h"
#include "xla_plugin/engine/common/flight_recorder.h"
#include "xla_plugin/engine/common/job_view.h"
#include "xla_plugin/engine/common/options.h"
#include "xla_plugin/engine/control/peer_table.h"
#include "xla_plugin/engine/device/channel_setup.h"
#include "xla_plugin/engine/device/device_engine.h"
#include "xla_plugin/engine/device/device_rank.h"
#include "xla_plugin/engine/host/completion_pool.h"
#include "xla_plugin/engine/host/host_handles.h"
#include "xla_plugin/engine/progress_engine.h"

namespace jaxhet {

// A rank of this process, and its device.
struct OwnDevice {
  int rank;
  int ordinal;
  std::span<std::byte> operands;  // see ChannelSetup
};

// The engine of one process: a ProgressEngine, the thread that drives it and the threads that
// complete. All functions can be called from any thread; those that can fail throw Error.
//
// The `ProgressEngine` belongs to whoever holds the monitor. A command is queued, and then run by
// its own thread if the monitor is free: a small exchange then needs no hop to the progress thread.
// A thread never waits for the monitor to run a command; it leaves it to the holder.
class Engine final : public std::enable_shared_from_this<Engine>, public JobView {
 public:
  Engine(int process, int num_processes, const Options& options);
  ~Engine() override;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Set-up, by one thread: peers first, then Connect, which joins them and starts the progress
  // thread.
  void AddPeer(PeerSpec spec);
  void Connect(std::chrono::milliseconds timeout);
  // Connects one more peer, which does the same. Any thread may call it after Connect. Throws why
  // the two can't agree on a transport.
  void JoinPeer(PeerSpec spec, std::chrono::milliseconds timeout);

  // Both are called after Connect. The ranks, and an exchange's plan, are set before it starts.
  void SetRanks(std::vector<RankInfo> ranks);
  // See Plan. The exchanges of the plan can then start by their places in it.
  void AddPlan(int64_t plan, std::string text, std::string program = {},
               const std::vector<PlannedExchange>& exchanges = {});
  // The part of a rank of this process. Throws UsageError if the plan or the exchange was not
  // added, or the rank has no part in it.
  std::shared_ptr<const RankExchange> Planned(int64_t plan, int64_t index, int rank) const;

  // Returns at once. `request.done` is called by a completion thread, or by this one before the
  // return; never with a lock held.
  void Start(ExchangeRequest request);
  int RankOfDevice(int64_t device_id) const;

  // For ranks that are devices with memory of their own; after SetRanks. Opens the devices of this
  // process and agrees with the other processes on the channels between all ranks. Channels of
  // `later` only get memory.
  void OpenDevices(const Vendor& vendor, const std::vector<OwnDevice>& own,
                   std::vector<ChannelSockets> sockets, std::chrono::milliseconds timeout,
                   const std::vector<ChannelPair>& later = {});
  // Opens some channels of `later`: those between ranks of this process and of one peer, which
  // opens them too. It makes no driver call, so any thread may call it during exchanges.
  void OpenChannels(const std::vector<ChannelPair>& pairs, std::vector<ChannelSockets> sockets,
                    std::chrono::milliseconds timeout);
  // Stays valid while it is held, also over a Close(). Throws UsageError before OpenDevices() and
  // after Close().
  std::shared_ptr<DeviceEngine> devices() const;
  std::shared_ptr<DeviceEngine> FindDevices() const;  // null instead of the error

  // Fails the engine for a reason found elsewhere.
  void Fail(const Error& error) override;
  void Lose(int peer_rank, std::string_view why) override;
  bool HasLeft(int rank) override;
  void SendChannelMessage(int process, std::string body) override;
  std::vector<ChannelMessage> TakeChannelMessages(
      const std::function<bool(const ChannelMessage&)>& want) override;
  // The first cause, or null.
  std::shared_ptr<const Error> failure() const override;
  RankFacts FactsOf(int rank, int64_t plan, int64_t index) override;
  // Waits for a failure, the close or the timeout.
  std::shared_ptr<const Error> WaitFailure(std::chrono::milliseconds timeout) const;

  // Waits for the exchanges under way, says goodbye, waits for the peers to close as well, ends all
  // threads and closes all files. Exchanges that are still under way after `timeout` fail the job.
  // Other threads may be inside any function: what they have started is completed, and from then
  // on they get UsageError.
  void Close(std::chrono::milliseconds timeout);
  // In a forked child: closes the child's copies of the sockets for control and between CPUs, so
  // that peers see when this process has died while the child lives; nothing else works there. The
  // object must be held by a shared_ptr, and is never destroyed: the threads that hold parts of it
  // do not exist in the child.
  void AbandonInChild();

  // Runs `reader` while nothing moves. For statistics.
  template <typename Reader>
  auto Read(Reader reader) const {
    CheckUsable();
    const std::lock_guard lock(monitor_);
    if (!progress_) ThrowClosed();
    return reader(std::as_const(*progress_));
  }

 private:
  void Join(std::vector<PeerSpec> specs, Time deadline, Time silent_until);
  void StartExchange(ExchangeRequest request);
  void LogUnfinished();

  using Command = std::function<void(ProgressEngine&)>;
  using Prepared = std::vector<std::map<int, RankExchange>>;  // by index and rank of this process

  void ConnectChannels(std::span<const std::unique_ptr<DeviceRank>> ranks,
                       std::span<const ChannelPair> pairs, std::span<ChannelSockets> sockets,
                       const ChannelOptions& options, Time deadline);
  void WaitIdle(Time deadline) const;
  void CloseDevices(std::chrono::milliseconds timeout);

  void CheckUsable() const;
  [[noreturn]] static void ThrowClosed();
  // Runs the command now or leaves it to the monitor's holder. Completions are of this run.
  std::vector<Completion> Submit(Command command);
  void SubmitUnlessClosed(Command command);
  void RunCommands();
  void Complete(std::vector<Completion> completions);
  void Publish();
  void CloseCore();
  void Progress();
  bool Turn(std::span<const epoll_event> events);
  void Poll(Pollable* pollable);
  void Wake();

  const pid_t pid_;
  const int process_;
  std::vector<PeerSpec> specs_;               // until Connect()
  std::shared_ptr<ProgressEngine> progress_;  // under monitor_; null after Close()
  mutable std::mutex monitor_;
  HostHandles handles_;
  CompletionPool pool_;
  std::thread progress_thread_;
  Fd epoll_;
  Fd wake_;                             // under inbox_mutex_ for all but the progress thread
  std::vector<int> inherited_fds_;      // to close in a forked child
  std::shared_ptr<Engine> keep_alive_;  // there

  mutable std::mutex inbox_mutex_;
  std::vector<Command> inbox_;                                // under inbox_mutex_
  std::vector<int64_t> device_ids_;                           // by rank; under inbox_mutex_
  std::vector<int> own_ranks_;                                // under inbox_mutex_
  std::map<int64_t, std::shared_ptr<const Prepared>> plans_;  // under inbox_mutex_
  std::atomic<bool> closed_ = false;
  std::atomic<int64_t> last_id_ = 0;
  std::atomic<Time> wakes_at_ = Time::max();  // the progress thread, by itself

  mutable std::mutex failure_mutex_;
  mutable std::condition_variable failure_known_;
  std::shared_ptr<const Error> failure_;
  Time close_deadline_ = Time::max();  // under monitor_

  const Options options_;
  mutable std::mutex devices_mutex_;
  std::shared_ptr<DeviceEngine> devices_;  // from OpenDevices to Close; under devices_mutex_
};

// The table of live engines, by session. It is global because a compiled program can name its
// engine by a number only.
void RegisterEngine(int64_t session, const std::shared_ptr<Engine>& engine);
// Throws UsageError if it does not exist (any more).
std::shared_ptr<Engine> FindEngine(int64_t session);

}  // namespace jaxhet

#endif  // XLA_PLUGIN_ENGINE_ENGINE_H_
