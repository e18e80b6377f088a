#ifndef TESTS_SOFTVERBS_LIBRARY_FABRIC_H_
#define TESTS_SOFTVERBS_LIBRARY_FABRIC_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tests/softverbs/library/verbs_values.h"

// The hardware: devices with ports, and what joins them. Every process that has the same devices
// sees the same hardware, as the processes of one host do.
namespace jaxhet::softverbs {

struct GidRow {
  ibv::Gid gid;
  uint32_t type;
  bool is_there = true;
};

struct PortModel {
  uint8_t link_layer = ibv::kLinkLayerEthernet;
  int mtu = ibv::kMtu4096;
  uint16_t lid = 0;
  bool is_up = true;
  std::vector<GidRow> gids;

  // The row of the table, or nullptr if it is empty.
  const GidRow* FindGid(int index) const;
};

struct DeviceModel : ibv::Device {
  uint32_t max_inline = 220;
  int max_cqe = 1 << 15;
  std::vector<PortModel> ports;

  // nullptr if there is none of that number, which counts from 1.
  PortModel* FindPort(int number);
  const PortModel* FindPort(int number) const;
};

// Target and source of a packet.
struct Route {
  ibv::Gid from;
  ibv::Gid to;
  uint32_t gid_type = 0;
  uint16_t lid = 0;  // InfiniBand only, where no GID is needed
  uint8_t is_global = 0;
};

struct DeviceSpec {
  std::string name;
  int ports = 1;
  bool is_infiniband = false;
  int mtu = ibv::kMtu4096;
};

class Fabric {
 public:
  // Two devices of one RoCE port each, soft0 and soft1, unless devices were added before.
  const std::vector<std::unique_ptr<DeviceModel>>& Devices();
  void Add(const DeviceSpec& spec);
  void Clear() { devices_.clear(); }

  // nullptr if there is none of that name.
  DeviceModel* Find(std::string_view name);

  // Fills `route`; false if the port is down or the GID of that index is gone.
  static bool Leave(const PortModel& port, const ibv::AhAttr& address, Route& route);
  // True if a packet on `route` reaches the port.
  static bool Arrives(const PortModel& port, const Route& route);

 private:
  std::vector<std::unique_ptr<DeviceModel>> devices_;
};

}  // namespace jaxhet::softverbs

#endif  // TESTS_SOFTVERBS_LIBRARY_FABRIC_H_
