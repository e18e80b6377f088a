#ifndef XLA_PLUGIN_NET_VERBS_NICS_H_
#define XLA_PLUGIN_NET_VERBS_NICS_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "xla_plugin/base/error.h"
#include "xla_plugin/net/verbs/device.h"
#include "xla_plugin/net/verbs/verbs_abi.h"

namespace jaxhet::verbs {

// "::ffff:10.0.0.1", "fe80::1".
std::string ToString(const ibv::Gid& gid);
bool IsIpv4(const ibv::Gid& gid);

// The GID that a RoCE port is to use: RoCE v2, of a netdev, IPv4 before global IPv6, the lowest
// index of those. `wanted` is an index that overrides this, or -1. Throws TransportError,
// which lists the table, if no GID fits or the wanted entry is empty.
GidEntry ChooseGid(std::span<const GidEntry> table, int wanted);

// Why ChooseGid() has chosen `chosen`.
std::string ReasonFor(const GidEntry& chosen, int wanted);

// Longest chunk of a connection. Soft-RoCE sends no longer messages; other NICs do.
inline constexpr size_t kMostMessageBytes = size_t{8} << 20;

// A port that is in use, and what all connections over it share.
struct Nic {
  Nic(std::shared_ptr<const VerbsApi> its_api, NicInfo its_info,
      std::shared_ptr<Context> its_context)
      : api(std::move(its_api)),
        info(std::move(its_info)),
        context(std::move(its_context)),
        domain(*context) {}

  std::shared_ptr<const VerbsApi> api;
  NicInfo info;
  std::shared_ptr<Context> context;  // shared by all ports of the device
  ProtectionDomain domain;
};

// The NICs of this process. The first call of Usable() opens them; connections keep the NICs that
// they use. Any thread may call Usable().
class Nics {
 public:
  explicit Nics(Options options) : options_(std::move(options)) {}

  const Options& options() const { return options_; }
  // NICs to use, by name. Throws TransportError, which says why and what to do, if none is usable.
  std::span<const std::shared_ptr<Nic>> Usable();
  // Usable NICs that are nearest to a device on PCI; all of them for a device of unknown place.
  std::vector<std::shared_ptr<Nic>> Near(std::string_view pci);
  // Closes NICs that no connection uses. No connection is made afterwards.
  void Release() { usable_.clear(); }

 private:
  void Open();

  Options options_;
  std::mutex opening_;
  std::vector<std::shared_ptr<Nic>> usable_;
  std::optional<Error> failure_;
};

// Description of a NIC of ours for the peer, but for keys and the queue pair.
NicPairInfo InfoOf(const NicInfo& nic);

struct OpenNic {
  NicInfo info;
  std::shared_ptr<Context> context;
};

// Every port of every device; `problem` says why the transport leaves one out. Throws
// TransportError if there is no device.
std::vector<OpenNic> ListNics(const VerbsApi& api, const Options& options);

// Describes the same ports and closes the devices. Also throws TransportError without libibverbs.
std::vector<NicInfo> DescribeNics(const Options& options);

// PCI address, "0000:01:00.0", of the NIC with this folder of sysfs, /sys/class/infiniband/NAME;
// empty for a NIC in software.
std::string PciAddressOf(const std::string& device_folder);

// How near two devices are by their PCI addresses: nearer the more bridges they share in the tree
// of sysfs, and then on one NUMA node. A device that sysfs does not know shares none.
int Nearness(std::string_view sysfs, std::string_view pci_a, std::string_view pci_b);

// Rate of a port in Gbit/s as the kernel states it; 0 if it does not. `folder`: the device's in
// sysfs.
double PortGbps(const std::string& folder, int port);

// Marks what the options leave out, and ports that are much slower than the fastest.
void Select(std::span<OpenNic> nics, std::string_view devices);

}  // namespace jaxhet::verbs

#endif  // XLA_PLUGIN_NET_VERBS_NICS_H_
