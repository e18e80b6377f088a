#ifndef XLA_PLUGIN_ENGINE_HOST_HOST_HANDLES_H_
#define XLA_PLUGIN_ENGINE_HOST_HOST_HANDLES_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "xla_plugin/base/error.h"
#include "xla_plugin/engine/common/exchange.h"
#include "xla_plugin/engine/common/handles.h"

namespace jaxhet {

// The exchanges of `jaxhet.start` between CPUs: an exchange moves a copy of the operand into memory
// of its own, from which each `jaxhet.finish` copies one member's part. Any thread may call it.
class HostHandles {
 public:
  // Copies the operand into memory of its own, and into the result. Returns the exchange of that
  // memory.
  ExchangeRequest Start(const ExchangeRequest& request);
  // Returns an exchange without bytes, in which the ranks compare their programs. When that has
  // started, Deliver() completes the request as soon as the data has arrived. None if this job has
  // not started the exchange: the request is all of it.
  std::optional<ExchangeRequest> Finish(const ExchangeRequest& request);
  void Deliver(const ExchangeRequest& request);
  Unfinished unfinished() const;

 private:
  // A finish that waits for data.
  struct Wanted {
    std::span<const std::byte> part;
    std::span<std::byte> target;
    DoneCallback done;
  };
  // Members but the memory change under the mutex.
  struct Handle {
    HandleState state;
    SharedList<int> group;
    std::vector<std::byte> operand;
    std::vector<std::byte> result;
    bool has_ended = false;
    std::optional<Error> error;
    std::vector<Wanted> wanted;
  };

  void End(Handle& handle, const Error* error);
  static void Complete(const Handle& handle, const Wanted& wanted);

  mutable std::mutex mutex_;
  std::map<std::pair<int, int64_t>, std::shared_ptr<Handle>> handles_;  // by rank and key
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_ENGINE_HOST_HOST_HANDLES_H_
