#include <arpa/inet.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <utility>

#include "tests/cpp/testing.h"
#include "tests/cpp/world.h"
#include "xla_plugin/net/verbs/nics.h"
#include "xla_plugin/net/verbs/wire.h"

// Which NICs and GIDs the verbs transport chooses, and what it sends.
namespace jaxhet::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

using verbs::GidEntry;
using verbs::GidType;

ibv::Gid Gid(const char* text) {
  ibv::Gid gid;
  if (inet_pton(AF_INET6, text, gid.raw.data()) != 1) {
    ADD_FAILURE() << text;
  }
  return gid;
}

constexpr const char* kLinkLocal = "fe80::200:ff:fe00:1";
constexpr const char* kGlobal = "2001:db8::1";
constexpr const char* kIpv4 = "::ffff:10.0.0.1";

GidEntry Entry(int index, const char* gid, GidType type = GidType::kRoceV2,
               const std::string& netdev = "eth0") {
  return {.index = index, .gid = Gid(gid), .type = type, .netdev = netdev};
}

TEST(VerbsTest, ChoosesRoutableGidOfRoceV2) {
  const std::vector<GidEntry> table = {Entry(0, kLinkLocal, GidType::kRoceV1),
                                       Entry(1, kLinkLocal),
                                       Entry(2, kIpv4, GidType::kRoceV1),
                                       Entry(3, kGlobal),
                                       Entry(4, kIpv4, GidType::kRoceV2, ""),
                                       Entry(6, kIpv4),
                                       Entry(7, kIpv4)};
  EXPECT_EQ(verbs::ChooseGid(table, -1).index, 6);
  EXPECT_EQ(verbs::ChooseGid(std::span(table).first(5), -1).index, 3);
  EXPECT_EQ(verbs::ChooseGid(table, 2).index, 2);  // the index that an option chose
}

TEST(VerbsTest, ExplainsWhyNoGidCanBeUsed) {
  const std::vector<GidEntry> table = {Entry(0, kLinkLocal, GidType::kRoceV1), Entry(1, kLinkLocal),
                                       Entry(3, kIpv4, GidType::kRoceV2, "")};
  const std::string text = ThrownText([&] { verbs::ChooseGid(table, -1); });
  EXPECT_THAT(text, HasSubstr("0: fe80::200:ff:fe00:1 RoCE v1 on eth0, not routed"));
  EXPECT_THAT(text, HasSubstr("1: fe80::200:ff:fe00:1 RoCE v2 on eth0, link-local"));
  EXPECT_THAT(text, HasSubstr("3: ::ffff:10.0.0.1 RoCE v2, no netdev here"));
  EXPECT_THAT(text, HasSubstr("set JAXHET_VERBS_GID_INDEX"));
  EXPECT_THAT(ThrownText([&] { verbs::ChooseGid(table, 2); }), HasSubstr("GID index 2 is empty"));
  EXPECT_THAT(ThrownText([&] { verbs::ChooseGid({}, -1); }), HasSubstr("GID table is empty"));
}

// Folder of files for a test, deleted with the object.
class Folder {
 public:
  Folder() {
    std::string name = std::filesystem::temp_directory_path() / "jaxhet_XXXXXX";
    path_ = mkdtemp(name.data());
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  std::string path() const { return path_; }
  void Put(const std::string& name, std::string_view text) const {
    std::filesystem::create_directories((path_ / name).parent_path());
    std::ofstream(path_ / name) << text << "\n";
  }
  void Link(const std::string& name, const std::string& target) const {
    std::filesystem::create_directories((path_ / name).parent_path());
    std::filesystem::create_symlink(path_ / target, path_ / name);
  }

 private:
  std::filesystem::path path_;
};

TEST(VerbsTest, TakesTheRateOfAPortFromTheKernel) {
  const Folder sysfs;
  sysfs.Put("mlx5_0/ports/2/rate", "2.5 Gb/sec (1X SDR)");
  EXPECT_EQ(verbs::PortGbps(sysfs.path() + "/mlx5_0", 2), 2.5);
  EXPECT_EQ(verbs::PortGbps(sysfs.path() + "/mlx5_0", 1), 0);
}

// A device of the PCIe tree; `path` leads there from the host bridge.
void PutPci(const Folder& sysfs, const std::string& path, int numa_node) {
  sysfs.Put("devices/" + path + "/numa_node", std::to_string(numa_node));
  sysfs.Link("bus/pci/devices/" + path.substr(path.rfind('/') + 1), "devices/" + path);
}

TEST(VerbsTest, NicIsNearByBridgesAndThenByNumaNode) {
  const Folder sysfs;
  const std::string pcie_switch = "pci0000:00/0000:00:01.0/0000:01:00.0/";
  PutPci(sysfs, pcie_switch + "0000:02:00.0/0000:0a:00.0", 0);
  PutPci(sysfs, pcie_switch + "0000:02:01.0/0000:04:00.0", 0);
  PutPci(sysfs, "pci0000:00/0000:00:01.0/0000:05:00.0", 0);
  PutPci(sysfs, "pci0000:00/0000:00:02.0/0000:08:00.0", 0);
  PutPci(sysfs, "pci0000:40/0000:40:01.0/0000:41:00.0", 0);
  PutPci(sysfs, "pci0000:80/0000:80:01.0/0000:81:00.0", 1);
  const auto nearness = [&](const char* pci) {
    return verbs::Nearness(sysfs.path(), "0000:0A:00.0", pci);
  };
  EXPECT_GT(nearness("0000:04:00.0"), nearness("0000:05:00.0"));  // below one switch
  EXPECT_GT(nearness("0000:05:00.0"), nearness("0000:08:00.0"));
  EXPECT_GT(nearness("0000:08:00.0"), nearness("0000:41:00.0"));  // below one host bridge
  EXPECT_GT(nearness("0000:41:00.0"), nearness("0000:81:00.0"));  // on one NUMA node
  EXPECT_GT(nearness("0000:81:00.0"), nearness("0000:99:00.0"));  // sysfs lacks 99:00.0
  EXPECT_EQ(nearness("0000:99:00.0"), 0);
}

TEST(VerbsTest, FindsPciAddressOfNic) {
  const Folder sysfs;
  PutPci(sysfs, "pci0000:00/0000:00:01.0/0000:01:00.0", 0);
  sysfs.Put("devices/pci0000:00/0000:00:01.0/0000:01:00.0/auxiliary.roce.0/uevent", "");
  sysfs.Link("mlx5_0/device", "devices/pci0000:00/0000:00:01.0/0000:01:00.0");
  sysfs.Link("bnxt_re0/device", "devices/pci0000:00/0000:00:01.0/0000:01:00.0/auxiliary.roce.0");
  sysfs.Put("rxe0/node_desc", "rxe");
  EXPECT_EQ(verbs::PciAddressOf(sysfs.path() + "/mlx5_0"), "0000:01:00.0");
  EXPECT_EQ(verbs::PciAddressOf(sysfs.path() + "/bnxt_re0"), "0000:01:00.0");
  EXPECT_EQ(verbs::PciAddressOf(sysfs.path() + "/rxe0"), std::string());
}

verbs::OpenNic NicOf(const std::string& device, double gbps, const std::string& problem = "") {
  verbs::NicInfo info;
  info.device = device;
  info.port = 1;
  info.name = device + ":1";
  info.gbps = gbps;
  info.problem = problem;
  return {info, nullptr};
}

TEST(VerbsTest, LeavesSlowAndUnwantedNicsOut) {
  std::vector<verbs::OpenNic> nics = {NicOf("mlx5_0", 400), NicOf("mlx5_1", 25),
                                      NicOf("mlx5_2", 200), NicOf("mlx5_3", 800, "down")};
  const std::vector<verbs::OpenNic> all = nics;
  verbs::Select(nics, "");
  EXPECT_TRUE(nics[0].info.problem.empty() && nics[2].info.problem.empty());
  EXPECT_THAT(nics[1].info.problem, HasSubstr("25 Gbit/s are far below the fastest NIC's 400"));
  EXPECT_EQ(nics[3].info.problem, "down");
  nics = all;
  verbs::Select(nics, "mlx5_1,mlx5_2:1");
  EXPECT_EQ(nics[0].info.problem, "not in JAXHET_VERBS_DEVICES");
  EXPECT_TRUE(nics[1].info.problem.empty() && nics[2].info.problem.empty());
}

std::vector<verbs::NicInfo> DescribeNics(std::string devices, int64_t gid_index) {
  verbs::Options options = NicOptions();
  options.devices = std::move(devices);
  options.gid_index = gid_index;
  return verbs::DescribeNics(options);
}

// NICs of the software libibverbs.
TEST(VerbsTest, DescribesNicsAsOptionsHaveThem) {
  const auto chosen = DescribeNics("", -1);
  EXPECT_EQ(chosen.size(), size_t{2});
  EXPECT_EQ(chosen.at(0).name, "soft0:1");
  EXPECT_EQ(chosen[0].gid.index, 3);
  EXPECT_EQ(chosen[0].reason, "RoCE v2, IPv4, on lo");
  EXPECT_EQ(chosen[0].problem, std::string());
  const auto wanted = DescribeNics("soft1", 2);
  EXPECT_EQ(wanted.at(0).problem, "not in JAXHET_VERBS_DEVICES");
  EXPECT_EQ(wanted.at(1).gid.index, 2);
  EXPECT_THAT(wanted[1].reason, HasSubstr("JAXHET_VERBS_GID_INDEX: RoCE v1"));
  const auto empty = DescribeNics("", 9);
  EXPECT_TRUE(empty.at(0).reason.empty());
  EXPECT_THAT(empty[0].problem, HasSubstr("GID index 9 is empty: the port has 0: fe80::"));
}

TEST(VerbsTest, SaysThatThereIsNoLibrary) {
  const char* const name = "libibverbs_that_is_absent.so.1";
  const std::string text = ThrownText([&] { LoadVerbs({&name, 1}); });
  EXPECT_THAT(text, HasSubstr("jaxhet.TransportError: dlopen: libibverbs_that_is_absent.so.1"));
  EXPECT_THAT(text, Not(HasSubstr("\n")));
}

TEST(VerbsTest, SaysWhatToDoWhereACompletionQueueFails) {
  verbs::Nics nics(NicOptions(/*depth=*/2));
  const verbs::CompletionQueue queue(*nics.Usable().front()->context, 1);
  auto& poll = queue.get()->context->ops.poll_cq;
  const auto working = std::exchange(poll, [](ibv::Cq*, int, ibv::Wc*) { return -1; });
  std::array<ibv::Wc, 1> completions;
  const std::string text = ThrownText([&] { queue.Poll(completions, "soft0:1"); });
  poll = working;
  EXPECT_THAT(text, HasSubstr("TransportError: ibv_poll_cq on soft0:1 failed: the completion queue"
                              " was overrun, or the NIC is gone."));
  EXPECT_THAT(text, HasSubstr("JAXHET_VERBS_DEVICES"));
}

}  // namespace
}  // namespace jaxhet::testing
