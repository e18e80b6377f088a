#ifndef XLA_PLUGIN_TRANSPORT_VERBS_OPTIONS_H_
#define XLA_PLUGIN_TRANSPORT_VERBS_OPTIONS_H_

#include <cstdint>
#include <string>

namespace jaxhet::verbs {

struct Options {
  std::string devices;        // "mlx5_0,mlx5_1:2"; empty: all
  int64_t gid_index = -1;     // -1: chosen
  int64_t pkey_index = 0;     // of the port's table
  int64_t qps = 2;            // for data, to each peer over each NIC; one more is for credits
  int64_t depth = 8;          // chunks in flight to each peer over each NIC
  int64_t traffic_class = 0;  // of RoCE, in the IP header
  int64_t service_level = 0;  // of InfiniBand; RoCE: the priority of a VLAN
  int64_t timeout = 18;       // of an acknowledgement: 4.096 us * 2^timeout
  int64_t retries = 7;        // after that
};

}  // namespace jaxhet::verbs

#endif  // XLA_PLUGIN_TRANSPORT_VERBS_OPTIONS_H_
