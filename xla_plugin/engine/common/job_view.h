#ifndef XLA_PLUGIN_ENGINE_COMMON_JOB_VIEW_H_
#define XLA_PLUGIN_ENGINE_COMMON_JOB_VIEW_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "xla_plugin/base/error.h"
#include "xla_plugin/engine/common/messages.h"

namespace jaxhet {

// From another process, about a device channel.
struct ChannelMessage {
  int process;
  std::string body;
};

// Interface of the engine for exchanges between devices. Any thread may call it.
class JobView {
 public:
  virtual ~JobView() = default;
  // The first cause of the job's failure, or null.
  virtual std::shared_ptr<const Error> failure() const = 0;
  // Fails the job with `error`, unless this process has left it.
  virtual void Fail(const Error& error) = 0;
  // The path to a rank of another process broke. Fails the job, unless that process says why.
  virtual void Lose(int peer_rank, std::string_view why) = 0;
  // Whether the process of a rank has left the job. It has then taken all data that it wanted.
  virtual bool HasLeft(int rank) = 0;
  // Messages about channels arrive in that process's TakeChannelMessages(), in order.
  virtual void SendChannelMessage(int process, std::string body) = 0;
  // Wanted messages that have arrived; does not block.
  virtual std::vector<ChannelMessage> TakeChannelMessages(
      const std::function<bool(const ChannelMessage&)>& want) = 0;
  // A rank and its exchange, by the names that people know.
  virtual RankFacts FactsOf(int rank, int64_t plan, int64_t index) = 0;
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_ENGINE_COMMON_JOB_VIEW_H_
