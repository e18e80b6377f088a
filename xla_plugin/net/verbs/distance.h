#ifndef XLA_PLUGIN_NET_VERBS_DISTANCE_H_
#define XLA_PLUGIN_NET_VERBS_DISTANCE_H_

#include <string>
#include <string_view>

namespace jaxhet::verbs {

// Path between a GPU and a NIC, nearest first: one PCIe switch at most; several; the CPU's
// host bridge; several host bridges of one NUMA node; the link between NUMA nodes.
enum class Distance { kPix, kPxb, kPhb, kNode, kSys };

inline constexpr std::string_view kSysfs = "/sys";

// Distance of two devices by their PCI addresses, "0000:01:00.0", and their places in the tree of
// sysfs. A device that sysfs does not know is on no bridge and on NUMA node -1.
Distance DistanceBetween(std::string_view sysfs_root, std::string_view pci_a,
                         std::string_view pci_b);

// PCI address of the NIC with this folder of sysfs, /sys/class/infiniband/NAME; empty for a NIC in
// software.
std::string PciAddressOf(const std::string& device_folder);

}  // namespace jaxhet::verbs

#endif  // XLA_PLUGIN_NET_VERBS_DISTANCE_H_
