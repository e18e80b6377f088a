#ifndef XLA_PLUGIN_NET_VERBS_OPTIONS_H_
#define XLA_PLUGIN_NET_VERBS_OPTIONS_H_

#include <cstdint>
#include <string>

namespace jaxhet::verbs {

// No member has a default: those are in the table of jaxhet/_options.py, with the ranges.
struct Options {
  std::string devices;    // "mlx5_0,mlx5_1:2"; empty: all
  int64_t gid_index;      // -1: chosen
  int64_t pkey_index;     // index in the port's table
  int64_t qps;            // queue pairs for data, to each peer over each NIC
  int64_t depth;          // chunks in flight to each peer over each NIC
  int64_t traffic_class;  // RoCE: field of the IP header
  int64_t service_level;  // InfiniBand; RoCE: the priority of a VLAN
  int64_t timeout;        // wait for an acknowledgement: 4.096 us * 2^timeout
  int64_t retries;        // retransmissions before the queue pair fails
};

}  // namespace jaxhet::verbs

#endif  // XLA_PLUGIN_NET_VERBS_OPTIONS_H_
