#ifndef XLA_PLUGIN_ENGINE_DEVICE_DEVICE_ENGINE_H_
#define XLA_PLUGIN_ENGINE_DEVICE_DEVICE_ENGINE_H_

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "xla_plugin/engine/common/handles.h"
#include "xla_plugin/engine/common/job_view.h"
#include "xla_plugin/engine/common/options.h"
#include "xla_plugin/engine/device/device_rank.h"

namespace jaxhet {

// The exchanges between devices of one process: its ranks, and the watch, a thread that looks at
// what is in flight, at deadlines, and at the failure of the job, and records exchanges when it
// sees them start and end. They themselves need no thread.
class DeviceEngine {
 public:
  DeviceEngine(JobView& job, Options options, std::vector<std::unique_ptr<DeviceRank>> ranks);
  ~DeviceEngine();
  DeviceEngine(const DeviceEngine&) = delete;
  DeviceEngine& operator=(const DeviceEngine&) = delete;

  std::span<const std::unique_ptr<DeviceRank>> ranks() const { return ranks_; }
  // Finds a rank by the ordinal of its device. Throws UsageError if no rank has it.
  DeviceRank& RankOf(int ordinal);
  // Both are called by the thread that launches the device's work, in the order of the program, and
  // only put work on streams. An error fails the job, and is thrown.
  void Start(int ordinal, const DeviceRequest& request);
  void Done(int ordinal, const DeviceRequest& request);
  // See Handles. Called by the thread that registers a plan.
  void Reserve(int rank, int64_t handle, size_t operand_bytes, size_t group_size);
  Unfinished unfinished() const;

  // Waits until nothing is in flight and all that was sent has left this process. False at the
  // timeout, or if the job fails.
  bool WaitIdle(std::chrono::milliseconds timeout);
  // Longest wait among all ranks.
  std::optional<DeviceWait> OldestWait(std::span<const int> peer_ranks) const;
  // Called when the job has failed, by any thread, any number of times: ends what is in flight, and
  // poisons its results.
  void Abandon();

  std::map<std::string, uint64_t> Stats() const;
  // Counts of each channel.
  std::vector<PeerCounts> Counts() const;
  // The last exchanges, oldest first.
  std::vector<FlightRecord> FlightRecords() const;

 private:
  class Handles;

  template <typename Function>
  void Failing(DeviceRank& rank, int64_t plan, int64_t index, Function function);
  Error MismatchOf(int rank, const LaunchMismatch& mismatch);
  Error LateOf(int rank, const LateTransfer& late);
  void Watch();
  // The exchanges in flight; a late one fails the job.
  size_t Look();

  JobView& job_;
  const Options options_;
  const std::vector<std::unique_ptr<DeviceRank>> ranks_;
  std::map<int, std::unique_ptr<Handles>> handles_;  // by rank

  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_active_ = false;  // something may be in flight; under mutex_
  bool closing_ = false;    // under mutex_
  std::mutex abandon_mutex_;
  std::thread watch_;
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_ENGINE_DEVICE_DEVICE_ENGINE_H_
