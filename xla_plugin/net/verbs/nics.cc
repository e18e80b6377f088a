#include "xla_plugin/net/verbs/nics.h"

#include <arpa/inet.h>
#include <net/if.h>
#include <netinet/in.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <tuple>
#include <utility>

#include "xla_plugin/base/error.h"

namespace jaxhet::verbs {
namespace {

namespace fs = std::filesystem;

std::vector<GidEntry> GidTable(const Context& context, int port, int num_entries) {
  const VerbsApi& api = context.api();
  std::vector<GidEntry> table;
  for (int index = 0; index < num_entries; ++index) {
    ibv::GidEntry entry;
    const int error = api.query_gid_ex(context.get(), static_cast<uint32_t>(port),
                                       static_cast<uint32_t>(index), &entry, 0, sizeof entry);
    if (error != 0 || entry.gid == ibv::Gid{}) continue;  // ENODATA: empty
    std::array<char, IF_NAMESIZE> netdev{};
    if (entry.ndev_ifindex != 0) if_indextoname(entry.ndev_ifindex, netdev.data());
    table.push_back({.index = index,
                     .gid = entry.gid,
                     .type = static_cast<GidType>(entry.gid_type),
                     .netdev = netdev.data()});
  }
  return table;
}

NicInfo Describe(const Context& context, int port, const Options& options) {
  NicInfo info;
  info.device = context.name();
  info.port = port;
  info.name = StrCat(info.device, ":", port);
  try {
    const ibv::PortAttr attr = context.QueryPort(port);
    info.is_infiniband = attr.link_layer != ibv::kLinkLayerEthernet;
    info.gbps = PortGbps(context.folder(), port);
    info.mtu = attr.active_mtu;
    info.lid = attr.lid;
    if (attr.state != ibv::kPortActive) {
      info.problem = "the port is not active; check cable and switch";
    } else if (!info.is_infiniband) {
      const auto wanted = static_cast<int>(options.gid_index);
      info.gid = ChooseGid(GidTable(context, port, attr.gid_tbl_len), wanted);
      info.reason = ReasonFor(info.gid, wanted);
    } else if (attr.lid == 0) {
      info.problem = "the port has no LID; check the subnet manager";
    } else {
      info.reason = StrCat("InfiniBand, by LID ", attr.lid);
    }
  } catch (const Error& error) {
    info.problem = error.text();
  }
  return info;
}

// Drivers write addresses in capitals, too.
fs::path FolderOf(std::string_view sysfs, std::string_view pci) {
  std::string address(pci);
  std::ranges::transform(address, address.begin(),
                         [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return fs::path(sysfs) / "bus/pci/devices" / address;
}

// Where a link leads to, part by part; none if it is not there.
std::vector<std::string> PartsOf(const fs::path& link) {
  std::error_code ignored;
  const fs::path target = fs::canonical(link, ignored);
  return {target.begin(), target.end()};
}

int NumaNode(const fs::path& folder) {
  int node = -1;
  std::ifstream(folder / "numa_node") >> node;
  return node;
}

// "mlx5_0" or "mlx5_0:1".
bool Names(std::string_view part, const NicInfo& info) {
  return part == info.device || part == info.name;
}

bool IsWanted(std::string_view devices, const NicInfo& info) {
  if (devices.empty()) return true;
  while (true) {
    const size_t comma = devices.find(',');
    if (Names(devices.substr(0, comma), info)) return true;
    if (comma == std::string_view::npos) return false;
    devices.remove_prefix(comma + 1);
  }
}

// mlx5_2 before mlx5_10.
bool ComesBefore(const OpenNic& a, const OpenNic& b) {
  const auto key = [](const OpenNic& nic) {
    return std::tuple(nic.info.device.size(), std::string_view(nic.info.device), nic.info.port);
  };
  return key(a) < key(b);
}

constexpr std::string_view kAdvice =
    "Give the NIC's netdev an IP address, or set JAXHET_VERBS_GID_INDEX.";

in6_addr ToAddress(const ibv::Gid& gid) {
  in6_addr address{};
  std::memcpy(&address, gid.raw.data(), sizeof address);
  return address;
}

bool IsLinkLocal(const ibv::Gid& gid) {
  const in6_addr address = ToAddress(gid);
  return IN6_IS_ADDR_LINKLOCAL(&address);
}

std::string_view NameOf(GidType type) {
  switch (type) {
    case GidType::kInfiniband:
      return "InfiniBand";
    case GidType::kRoceV1:
      return "RoCE v1";
    case GidType::kRoceV2:
      return "RoCE v2";
  }
  return "?";
}

// Why the entry can't be chosen, or null.
const char* Problem(const GidEntry& entry) {
  if (entry.type != GidType::kRoceV2) return "not routed";
  if (entry.netdev.empty()) return "no netdev here";
  if (IsLinkLocal(entry.gid)) return "link-local";
  return nullptr;
}

std::string Describe(const GidEntry& entry) {
  const char* const problem = Problem(entry);
  return StrCat(entry.index, ": ", ToString(entry.gid), " ", NameOf(entry.type),
                entry.netdev.empty() ? "" : " on ", entry.netdev, problem == nullptr ? "" : ", ",
                problem == nullptr ? "" : problem);
}

std::string Describe(std::span<const GidEntry> table) {
  if (table.empty()) return "the port's GID table is empty. ";
  std::string text = "the port has ";
  for (const GidEntry& entry : table) {
    text += StrCat(&entry == table.data() ? "" : "; ", Describe(entry));
  }
  return text + ". ";
}

}  // namespace

NicPairInfo InfoOf(const NicInfo& nic) {
  NicPairInfo info{};
  nic.name.copy(info.nic.data(), info.nic.size() - 1);
  info.gid = nic.gid.gid.raw;
  info.mtu = static_cast<uint32_t>(nic.mtu);
  info.lid = nic.lid;
  info.is_infiniband = nic.is_infiniband ? 1 : 0;
  return info;
}

std::vector<OpenNic> ListNics(const VerbsApi& api, const Options& options) {
  int count = 0;
  const auto free = [&](ibv::Device** list) { api.free_device_list(list); };
  const std::unique_ptr<ibv::Device*, decltype(free)> list(api.get_device_list(&count), free);
  if (count <= 0) {
    Throw(ErrorCode::kTransport, ErrnoText("ibv_get_device_list", list ? ENODEV : errno),
          ". There is no RDMA NIC, or its driver is not loaded (in a container: /dev/infiniband "
          "is missing).");
  }
  std::vector<OpenNic> nics;
  for (ibv::Device* const device : std::span(list.get(), static_cast<size_t>(count))) {
    try {
      const auto context = std::make_shared<Context>(api, device);
      for (int port = 1; port == 1 || context->HasPort(port); ++port) {
        nics.push_back({Describe(*context, port, options), context});
      }
    } catch (const Error& error) {
      NicInfo info;
      info.name = info.device = api.get_device_name(device);
      info.problem = error.text();
      nics.push_back({std::move(info), nullptr});
    }
  }
  std::ranges::sort(nics, ComesBefore);
  Select(nics, options.devices);
  return nics;
}

std::vector<NicInfo> DescribeNics(const Options& options) {
  const VerbsApi api = LoadVerbs();
  std::vector<NicInfo> infos;
  for (const OpenNic& nic : ListNics(api, options)) infos.push_back(nic.info);
  return infos;
}

std::string PciAddressOf(const std::string& device_folder) {
  std::vector<std::string> parts = PartsOf(fs::path(device_folder) / "device");
  const auto is_pci_address = [](const std::string& name) {
    return std::ranges::count(name, ':') == 2;
  };
  // The device may lie some folders below its PCI device.
  while (!parts.empty() && !is_pci_address(parts.back())) parts.pop_back();
  return parts.empty() ? "" : parts.back();
}

int Nearness(std::string_view sysfs, std::string_view pci_a, std::string_view pci_b) {
  const fs::path folder_a = FolderOf(sysfs, pci_a);
  const fs::path folder_b = FolderOf(sysfs, pci_b);
  const std::vector<std::string> a = PartsOf(folder_a);
  const std::vector<std::string> b = PartsOf(folder_b);
  const auto num_shared = std::ranges::mismatch(a, b).in1 - a.begin();
  return 2 * static_cast<int>(num_shared) + (NumaNode(folder_a) == NumaNode(folder_b) ? 1 : 0);
}

double PortGbps(const std::string& folder, int port) {
  double gbps = 0;
  std::ifstream(StrCat(folder, "/ports/", port, "/rate")) >> gbps;  // "400 Gb/sec (4X NDR)"
  return gbps;
}

void Select(std::span<OpenNic> nics, std::string_view devices) {
  double fastest = 0;
  for (auto& [info, context] : nics) {
    if (!info.problem.empty()) continue;
    if (!IsWanted(devices, info)) info.problem = "not in JAXHET_VERBS_DEVICES";
    if (info.problem.empty()) fastest = std::max(fastest, info.gbps);
  }
  // A NIC for management beside the fast ones would hold them up.
  for (auto& [info, context] : nics) {
    if (!info.problem.empty() || !devices.empty() || info.gbps * 2 >= fastest) continue;
    info.problem = StrCat(info.gbps, " Gbit/s are far below the fastest NIC's ", fastest,
                          "; name it in JAXHET_VERBS_DEVICES to use it");
  }
}

std::span<const std::shared_ptr<Nic>> Nics::Usable() {
  const std::lock_guard lock(opening_);
  if (!failure_ && usable_.empty()) {
    try {
      Open();
    } catch (const Error& error) {
      failure_ = error;
    }
  }
  if (failure_) throw Error(*failure_);
  return usable_;
}

std::vector<std::shared_ptr<Nic>> Nics::Near(std::string_view pci) {
  const std::span<const std::shared_ptr<Nic>> usable = Usable();
  std::vector<std::shared_ptr<Nic>> near;
  int most = 0;
  for (const auto& nic : usable) {
    const std::string own = PciAddressOf(nic->context->folder());
    const int nearness = pci.empty() || own.empty() ? 0 : Nearness("/sys", pci, own);
    if (nearness < most) continue;
    if (nearness > most) near.clear();
    most = nearness;
    near.push_back(nic);
  }
  return near;
}

void Nics::Open() {
  const auto api = std::make_shared<const VerbsApi>(LoadVerbs());
  std::string problems;
  for (const auto& [info, context] : ListNics(*api, options_)) {
    if (info.problem.empty()) {
      usable_.push_back(std::make_shared<Nic>(api, info, context));
    } else {
      problems += StrCat(problems.empty() ? "" : "; ", info.name, ": ", info.problem);
    }
  }
  if (usable_.empty()) Throw(ErrorCode::kTransport, "no RDMA NIC can be used: ", problems);
}

bool IsIpv4(const ibv::Gid& gid) {
  const in6_addr address = ToAddress(gid);
  return IN6_IS_ADDR_V4MAPPED(&address);
}

std::string ToString(const ibv::Gid& gid) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  inet_ntop(AF_INET6, gid.raw.data(), text.data(), text.size());
  return text.data();
}

GidEntry ChooseGid(std::span<const GidEntry> table, int wanted) {
  if (wanted >= 0) {
    const auto found = std::ranges::find(table, wanted, &GidEntry::index);
    if (found != table.end()) return *found;
    Throw(ErrorCode::kTransport, "GID index ", wanted, " is empty: ", Describe(table),
          "Set JAXHET_VERBS_GID_INDEX to one of these, or not at all.");
  }
  const GidEntry* best = nullptr;
  for (const GidEntry& entry : table) {
    if (Problem(entry) != nullptr) continue;
    if (best == nullptr || (IsIpv4(entry.gid) && !IsIpv4(best->gid))) best = &entry;
  }
  if (best != nullptr) return *best;
  Throw(ErrorCode::kTransport, "no GID can be used: ", Describe(table), kAdvice);
}

std::string ReasonFor(const GidEntry& chosen, int wanted) {
  const char* const problem = Problem(chosen);
  return StrCat(wanted >= 0 ? "JAXHET_VERBS_GID_INDEX: " : "", NameOf(chosen.type), ", ",
                IsIpv4(chosen.gid) ? "IPv4" : "IPv6", chosen.netdev.empty() ? "" : ", on ",
                chosen.netdev, problem == nullptr ? "" : "; ", problem == nullptr ? "" : problem);
}

}  // namespace jaxhet::verbs
