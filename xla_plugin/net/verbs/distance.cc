#include "xla_plugin/net/verbs/distance.h"

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

namespace jaxhet::verbs {
namespace {

namespace fs = std::filesystem;

// Drivers write addresses in capitals, too.
fs::path FolderOf(std::string_view sysfs_root, std::string_view pci) {
  std::string address(pci);
  std::ranges::transform(address, address.begin(),
                         [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return fs::path(sysfs_root) / "bus/pci/devices" / address;
}

// Where a link leads to, part by part; none if it is not there.
std::vector<std::string> PartsOf(const fs::path& link) {
  std::error_code ignored;
  const fs::path target = fs::canonical(link, ignored);
  return {target.begin(), target.end()};
}

// From the host bridge to the device: "pci0000:00", "0000:00:01.0", ...
std::vector<std::string> BridgesTo(const fs::path& folder) {
  std::vector<std::string> parts = PartsOf(folder);
  const auto is_host_bridge = [](const std::string& part) {
    return part.starts_with("pci") && part.find(':') != std::string::npos;
  };
  parts.erase(parts.begin(), std::ranges::find_if(parts, is_host_bridge));
  return parts;
}

int NumaNode(const fs::path& folder) {
  int node = -1;
  std::ifstream(folder / "numa_node") >> node;
  return node;
}

// "0000:01:00.0".
bool IsPciAddress(std::string_view name) { return std::ranges::count(name, ':') == 2; }

}  // namespace

Distance DistanceBetween(std::string_view sysfs_root, std::string_view pci_a,
                         std::string_view pci_b) {
  const fs::path folder_a = FolderOf(sysfs_root, pci_a);
  const fs::path folder_b = FolderOf(sysfs_root, pci_b);
  const std::vector<std::string> a = BridgesTo(folder_a);
  const std::vector<std::string> b = BridgesTo(folder_b);
  const auto num_shared = std::ranges::mismatch(a, b).in1 - a.begin();
  if (num_shared > 1) {  // a bridge below the host bridge
    const auto num_below = std::ssize(a.size() > b.size() ? a : b) - num_shared;
    return num_below <= 2 ? Distance::kPix : Distance::kPxb;  // a switch has a port above a device
  }
  if (num_shared == 1) return Distance::kPhb;
  return NumaNode(folder_a) == NumaNode(folder_b) ? Distance::kNode : Distance::kSys;
}

std::string PciAddressOf(const std::string& device_folder) {
  std::vector<std::string> parts = PartsOf(fs::path(device_folder) / "device");
  // The device may be one below that of PCI.
  while (!parts.empty() && !IsPciAddress(parts.back())) parts.pop_back();
  return parts.empty() ? "" : parts.back();
}

}  // namespace jaxhet::verbs
