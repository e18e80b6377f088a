#ifndef XLA_PLUGIN_ENGINE_CONTROL_ROSTER_H_
#define XLA_PLUGIN_ENGINE_CONTROL_ROSTER_H_

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace jaxhet {

struct RankInfo {
  int64_t device_id = 0;
  int process = 0;
  int island = 0;
  std::string vendor;
};

// Who is who in the job, and what to call them.
class Roster {
 public:
  Roster(int process, int num_processes) : process_(process), num_processes_(num_processes) {}

  int process() const { return process_; }
  int num_processes() const { return num_processes_; }
  int num_ranks() const { return static_cast<int>(ranks_.size()); }
  void Describe(int process, std::string_view description);
  void SetRanks(std::vector<RankInfo> ranks) { ranks_ = std::move(ranks); }

  // Throws UsageError for a rank that does not exist (or before SetRanks).
  const RankInfo& Info(int rank) const;
  int ProcessOf(int rank) const { return Info(rank).process; }
  bool IsRankOf(int rank, int process) const {
    return rank >= 0 && rank < num_ranks() && ProcessOf(rank) == process;
  }
  std::vector<int> RanksOf(int process) const;

  // "rank 3/16 cpu1".
  std::string RankName(int rank) const;
  // "rank 3 of process 1 (<description>), cpu1".
  std::string RankAndProcess(int rank) const;
  // "process 1 (<description>)".
  std::string ProcessName(int process) const;
  // "process 0/2".
  std::string OwnName() const;

 private:
  int process_;
  int num_processes_;
  std::map<int, std::string> descriptions_;  // by process
  std::vector<RankInfo> ranks_;
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_ENGINE_CONTROL_ROSTER_H_
