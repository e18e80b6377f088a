#ifndef XLA_PLUGIN_NET_VERBS_WC_STATUS_H_
#define XLA_PLUGIN_NET_VERBS_WC_STATUS_H_

#include <string>

#include "xla_plugin/net/verbs/verbs_abi.h"

namespace jaxhet::verbs {

// The fault is in what was posted: it would fail on any other queue pair as well.
bool IsFatal(int status);

// "IBV_WC_RETRY_EXC_ERR (12, vendor error 129)".
std::string Describe(const ibv::Wc& wc);

}  // namespace jaxhet::verbs

#endif  // XLA_PLUGIN_NET_VERBS_WC_STATUS_H_
