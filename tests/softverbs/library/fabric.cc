#include "tests/softverbs/library/fabric.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/strings.h"

namespace jaxhet::softverbs {
namespace {

constexpr int kNodeCa = 1;       // IBV_NODE_CA
constexpr int kTransportIb = 0;  // IBV_TRANSPORT_IB

ibv::Gid LinkLocal(uint8_t host) {
  ibv::Gid gid;
  gid.raw = {0xfe, 0x80, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0xff, 0xfe, 0, 0, host};
  return gid;
}

// 127.0.0.<host>, as an IPv6 address: the machine routes it.
ibv::Gid Ipv4(uint8_t host) {
  ibv::Gid gid;
  gid.raw = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127, 0, 0, host};
  return gid;
}

// The order of drivers: the link-local ones come first, and are not what one wants.
std::vector<GidRow> GidsOf(uint8_t host, bool is_infiniband) {
  if (is_infiniband) return {{.gid = LinkLocal(host), .type = ibv::kGidTypeIb}};
  return {{.gid = LinkLocal(host), .type = ibv::kGidTypeRoceV1},
          {.gid = LinkLocal(host), .type = ibv::kGidTypeRoceV2},
          {.gid = Ipv4(host), .type = ibv::kGidTypeRoceV1},
          {.gid = Ipv4(host), .type = ibv::kGidTypeRoceV2}};
}

template <size_t kSize>
void SetText(std::array<char, kSize>& to, std::string_view text) {
  to = {};
  std::ranges::copy(text.substr(0, kSize - 1), to.begin());
}

}  // namespace

const GidRow* PortModel::FindGid(int index) const {
  if (index < 0 || std::cmp_greater_equal(index, gids.size())) return nullptr;
  const GidRow& row = gids[static_cast<size_t>(index)];
  return row.is_there ? &row : nullptr;
}

const PortModel* DeviceModel::FindPort(int number) const {
  if (number < 1 || std::cmp_greater(number, ports.size())) return nullptr;
  return &ports[static_cast<size_t>(number - 1)];
}

PortModel* DeviceModel::FindPort(int number) {
  return const_cast<PortModel*>(std::as_const(*this).FindPort(number));
}

const std::vector<std::unique_ptr<DeviceModel>>& Fabric::Devices() {
  if (devices_.empty()) {
    Add({.name = "soft0"});
    Add({.name = "soft1"});
  }
  return devices_;
}

void Fabric::Add(const DeviceSpec& spec) {
  auto device = std::make_unique<DeviceModel>();
  static_cast<ibv::Device&>(*device) = {};
  device->node_type = kNodeCa;
  device->transport_type = kTransportIb;
  SetText(device->name, spec.name);
  SetText(device->dev_name, StrCat("uverbs", devices_.size()));
  // The folder does not exist: files read from there are absent, as in a container.
  SetText(device->ibdev_path, StrCat("/sys/class/infiniband/", spec.name));
  for (int port = 0; port < spec.ports; ++port) {
    const auto host = CheckedCast<uint8_t>(1 + 8 * devices_.size() + static_cast<size_t>(port));
    device->ports.push_back(
        {.link_layer = spec.is_infiniband ? ibv::kLinkLayerInfiniband : ibv::kLinkLayerEthernet,
         .mtu = spec.mtu,
         .lid = static_cast<uint16_t>(spec.is_infiniband ? host : 0),
         .gids = GidsOf(host, spec.is_infiniband)});
  }
  devices_.push_back(std::move(device));
}

DeviceModel* Fabric::Find(std::string_view name) {
  const auto found = std::ranges::find(
      Devices(), name, [](const auto& device) { return std::string_view(device->name.data()); });
  return found == devices_.end() ? nullptr : found->get();
}

bool Fabric::Leave(const PortModel& port, const ibv::AhAttr& address, Route& route) {
  route = {};
  route.to = address.grh.dgid;
  route.lid = address.dlid;
  route.is_global = address.is_global;
  if (!port.is_up) return false;
  if (address.is_global == 0) return true;
  const GidRow* const row = port.FindGid(address.grh.sgid_index);
  if (row == nullptr) return false;
  route.from = row->gid;
  route.gid_type = row->type;
  return true;
}

bool Fabric::Arrives(const PortModel& port, const Route& route) {
  if (!port.is_up) return false;
  if (port.link_layer == ibv::kLinkLayerInfiniband && port.lid != route.lid) return false;
  if (route.is_global == 0) return port.link_layer == ibv::kLinkLayerInfiniband;
  return std::ranges::any_of(port.gids, [&](const GidRow& row) {
    return row.is_there && row.type == route.gid_type && row.gid.raw == route.to.raw;
  });
}

}  // namespace jaxhet::softverbs
