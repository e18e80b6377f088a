#ifndef XLA_PLUGIN_NET_VERBS_GID_H_
#define XLA_PLUGIN_NET_VERBS_GID_H_

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "xla_plugin/net/verbs/verbs_abi.h"

namespace jaxhet::verbs {

enum class GidType { kInfiniband, kRoceV1, kRoceV2 };

// One entry of a port's GID table that is not empty.
struct GidEntry {
  int index = 0;
  ibv::Gid gid;
  GidType type = GidType::kInfiniband;
  std::string netdev;         // empty: none, or one of another network namespace
  bool netdev_is_up = false;  // true also if the kernel does not say
};

// "::ffff:10.0.0.1", "fe80::1".
std::string ToString(const ibv::Gid& gid);
bool IsIpv4(const ibv::Gid& gid);

// The GID that a RoCE port is to use: RoCE v2, of a netdev that is up, IPv4 before global IPv6, the
// lowest index of those. `wanted` is an index that overrides this, or -1. Throws TransportError,
// which lists the table, if no GID fits or the wanted entry is empty.
GidEntry ChooseGid(std::span<const GidEntry> table, int wanted);

// Why ChooseGid() has chosen `chosen`.
std::string ReasonFor(const GidEntry& chosen, int wanted);

bool NetdevIsUp(const std::string& netdev, const std::string& folder = "/sys/class/net");

}  // namespace jaxhet::verbs

#endif  // XLA_PLUGIN_NET_VERBS_GID_H_
