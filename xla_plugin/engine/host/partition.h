#ifndef XLA_PLUGIN_ENGINE_HOST_PARTITION_H_
#define XLA_PLUGIN_ENGINE_HOST_PARTITION_H_

#include <vector>

#include "xla_plugin/base/io_list.h"
#include "xla_plugin/engine/common/exchange.h"

namespace jaxhet {

struct MemberParts {
  int rank;
  IoList send;
  IoList receive;
};

struct Partition {
  std::vector<MemberParts> members;  // the members that the rank meets, itself included
  IoList padding;                    // bytes of the results to set to zero
};

// Cuts the buffers of `request` into what goes to and comes from each member. Throws UsageError for
// sizes that do not fit the kind.
Partition PartitionBuffers(const ExchangeRequest& request);

}  // namespace jaxhet

#endif  // XLA_PLUGIN_ENGINE_HOST_PARTITION_H_
