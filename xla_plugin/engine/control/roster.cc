#include "xla_plugin/engine/control/roster.h"

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"

namespace jaxhet {

void Roster::Describe(int process, std::string_view description) {
  descriptions_[process] = description;
}

const RankInfo& Roster::Info(int rank) const {
  if (!std::cmp_less(rank, ranks_.size()) || rank < 0) {
    Throw(ErrorCode::kUsage, "the job has ", ranks_.size(), " ranks, but rank ", rank,
          " is asked for");
  }
  return ranks_[static_cast<size_t>(rank)];
}

std::vector<int> Roster::RanksOf(int process) const {
  std::vector<int> ranks;
  for (int rank = 0; rank < num_ranks(); ++rank) {
    if (ProcessOf(rank) == process) ranks.push_back(rank);
  }
  return ranks;
}

std::string Roster::RankName(int rank) const {
  std::string name = StrCat("rank ", rank, "/", ranks_.size());
  if (rank < 0 || !std::cmp_less(rank, ranks_.size())) return name;
  const RankInfo& info = ranks_[static_cast<size_t>(rank)];
  return StrCat(name, " ", info.vendor, info.island);
}

std::string Roster::RankAndProcess(int rank) const {
  if (rank < 0 || !std::cmp_less(rank, ranks_.size())) return StrCat("rank ", rank);
  const RankInfo& info = ranks_[static_cast<size_t>(rank)];
  return StrCat("rank ", rank, " of ", ProcessName(info.process), ", ", info.vendor, info.island);
}

std::string Roster::ProcessName(int process) const {
  const auto found = descriptions_.find(process);
  const std::string name = StrCat("process ", process);
  return found == descriptions_.end() ? name : StrCat(name, " (", found->second, ")");
}

std::string Roster::OwnName() const { return StrCat("process ", process_, "/", num_processes_); }

}  // namespace jaxhet
