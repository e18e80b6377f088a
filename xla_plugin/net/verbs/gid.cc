#include "xla_plugin/net/verbs/gid.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "xla_plugin/base/error.h"

namespace jaxhet::verbs {
namespace {

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
  if (!entry.netdev_is_up) return "netdev is down";
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

bool NetdevIsUp(const std::string& netdev, const std::string& folder) {
  std::ifstream file(std::filesystem::path(folder) / netdev / "operstate");
  std::string state;
  std::getline(file, state);
  return state == "up" || state == "unknown";  // drivers without carrier detection: unknown
}

}  // namespace jaxhet::verbs
