#include "xla_plugin/net/verbs/loopback.h"

#include <array>
#include <chrono>

namespace jaxhet::verbs {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kTimeout{2};
constexpr int kNumEntries = 16;
constexpr size_t kReadBytes = 64;

}  // namespace

Loopback::Loopback(const std::shared_ptr<Nic>& nic, const Options& options)
    : nic_(*nic),
      host_({&nic, 1}, 1, kReadBytes, kPeerWrites),
      cq_(*nic->context, kNumEntries),
      qp_(nic->domain, cq_, {.sends = 1, .receives = 1}, nic->info.port,
          static_cast<uint16_t>(options.pkey_index),
          ibv::kAccessRemoteWrite | ibv::kAccessRemoteRead) {
  Route route = RouteOf(nic_.info, options);
  route.qp_num = qp_.number();
  route.psn = qp_.psn();
  qp_.Connect(route);
}

void Loopback::Copy(const MemoryRegion& region, std::span<const std::byte> from,
                    const std::byte* to) {
  Execute(ibv::kWrRdmaWrite, {reinterpret_cast<uint64_t>(from.data()), region},
          {reinterpret_cast<uint64_t>(to), region}, from.size());
}

// A read pushes the writes before it to where they go.
void Loopback::Flush(const MemoryRegion& region, uint64_t address) {
  const SlotMemory host = host_.slots();
  Execute(ibv::kWrRdmaRead, {host.address(0), host.memory->region(0)}, {address, region}, 1);
}

void Loopback::Execute(int opcode, const Memory& local, const Memory& remote, size_t num_bytes) {
  ibv::Sge sge{.addr = local.address,
               .length = static_cast<uint32_t>(num_bytes),
               .lkey = local.region.lkey()};
  ibv::SendWr wr;
  wr.wr_id = ++last_wr_id_;
  wr.sg_list = &sge;
  wr.num_sge = 1;
  wr.opcode = opcode;
  wr.send_flags = ibv::kSendSignaled;
  wr.remote_addr = remote.address;
  wr.rkey = remote.region.rkey();
  if (const int error = qp_.PostSend(wr)) ThrowCall("ibv_post_send", nic_.info.name, error);
  Await(wr.wr_id);
}

void Loopback::Await(uint64_t wr_id) {
  const auto limit = Clock::now() + kTimeout;
  std::array<ibv::Wc, 1> buffer;
  while (Clock::now() < limit) {
    const auto completions = cq_.Poll(buffer, nic_.info.name);
    if (completions.empty() || completions.front().wr_id != wr_id) continue;
    if (completions.front().status == ibv::kWcSuccess) return;
    Throw(ErrorCode::kTransport, nic_.info.name,
          " to itself: ", Describe(nic_.context->api(), completions.front()));
  }
  Throw(ErrorCode::kTransport, nic_.info.name, " to itself: no completion within ",
        kTimeout.count(), " s");
}

}  // namespace jaxhet::verbs
