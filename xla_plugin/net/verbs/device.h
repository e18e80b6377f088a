#ifndef XLA_PLUGIN_NET_VERBS_DEVICE_H_
#define XLA_PLUGIN_NET_VERBS_DEVICE_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "xla_plugin/device/device.h"
#include "xla_plugin/net/connection.h"
#include "xla_plugin/net/verbs/verbs_api.h"
#include "xla_plugin/net/verbs/wire.h"

// The objects of libibverbs, each owned by an object of ours. Arguments of a constructor outlive
// the object. Constructors and functions throw TransportError, which names call, NIC and errno,
// unless they return errno.
namespace jaxhet::verbs {

// No member has a default: those are in the table of jaxhet/_options.py, with the ranges.
struct Options {
  std::string devices;    // "mlx5_0,mlx5_1:2"; empty: all
  int64_t gid_index;      // -1: chosen
  int64_t pkey_index;     // index in the port's table
  int64_t qps;            // queue pairs for data, to each peer over each NIC
  int64_t depth;          // chunks in flight to each peer over each NIC
  int64_t traffic_class;  // RoCE: field of the IP header
  int64_t service_level;  // InfiniBand; RoCE: the priority of a VLAN
  int64_t timeout;        // wait for an acknowledgement: 4.096 us * 2^timeout
  int64_t retries;        // retransmissions before the queue pair fails
};

enum class GidType { kInfiniband, kRoceV1, kRoceV2 };

// One entry of a port's GID table that is not empty.
struct GidEntry {
  int index = 0;
  ibv::Gid gid;
  GidType type = GidType::kInfiniband;
  std::string netdev;  // empty: none, or one of another network namespace
};

// One port of an RDMA NIC; `problem` says why it can't be used.
struct NicInfo {
  std::string device;
  int port = 0;
  std::string name;  // "mlx5_0:1"
  bool is_infiniband = false;
  double gbps = 0;  // 0: unknown
  int mtu = 0;      // active, ibv_mtu
  uint16_t lid = 0;
  GidEntry gid;        // RoCE: the entry that is used
  std::string reason;  // RoCE: why this GID; InfiniBand: how it is addressed; empty: unknown
  std::string problem;
};

[[noreturn]] void ThrowCall(std::string_view call, std::string_view where, int error_number,
                            std::string_view advice = {});

// Text of a completion's failure: "transport retry counter exceeded (status 12, vendor error 129)".
std::string Describe(const VerbsApi& api, const ibv::Wc& wc);

// Owns an object, which `destroy` frees.
template <typename T>
class Handle {
 public:
  Handle(T* object, const Function<int(T*)>& destroy) : object_(object), destroy_(destroy) {}
  ~Handle() {
    if (const int error = destroy_(object_)) LogLine(ErrnoText(destroy_.name(), error));
  }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  T* get() const { return object_; }
  T* operator->() const { return object_; }

 private:
  T* object_;
  const Function<int(T*)>& destroy_;
};

// An open NIC. Its asynchronous events are not read: a queue pair that fails has completions.
class Context {
 public:
  Context(const VerbsApi& api, ibv::Device* device);

  const VerbsApi& api() const { return api_; }
  ibv::Context* get() const { return context_.get(); }
  const std::string& name() const { return name_; }
  // Folder in sysfs: /sys/class/infiniband/NAME.
  std::string folder() const { return context_->device->ibdev_path.data(); }

  // Ports count from 1; the kernel describes no other ones.
  bool HasPort(int port) const;
  ibv::PortAttr QueryPort(int port) const;

 private:
  const VerbsApi& api_;
  std::string name_;
  Handle<ibv::Context> context_;
};

class ProtectionDomain {
 public:
  explicit ProtectionDomain(const Context& context);

  const Context& context() const { return context_; }
  ibv::Pd* get() const { return pd_.get(); }

 private:
  const Context& context_;
  Handle<ibv::Pd> pd_;
};

// Memory that a NIC may read, and write with `access`. It does not own the memory. Work requests
// use the addresses of `memory`, which may be addresses of a device.
class MemoryRegion {
 public:
  // With a dma-buf, `memory` starts at its offset there. It may be closed afterwards.
  MemoryRegion(const ProtectionDomain& domain, std::span<std::byte> memory, int access,
               const DmaBuf* dma_buf = nullptr);

  uint32_t lkey() const { return mr_->lkey; }
  uint32_t rkey() const { return mr_->rkey; }

 private:
  Handle<ibv::Mr> mr_;
};

// A completion queue with a channel of its own; the engine polls the channel's descriptor.
class CompletionQueue final : public Pollable {
 public:
  CompletionQueue(const Context& context, int num_entries);

  ibv::Cq* get() const { return cq_.get(); }
  // The first completions, as many as there are and fit. `path` names NIC and port in an error.
  std::span<const ibv::Wc> Poll(std::span<ibv::Wc> buffer, std::string_view path) const;
  // Lets the next completion raise an event. Call Poll() once more afterwards: earlier completions
  // raise none. False if the queue was armed before.
  bool Arm();

  int fd() const override { return channel_->fd; }
  void OnEvents(uint32_t events) override;

 private:
  const Context& context_;
  Handle<ibv::CompChannel> channel_;
  Handle<ibv::Cq> cq_;
  bool armed_ = false;
};

struct QueuePairSizes {
  uint32_t sends = 0;
  uint32_t receives = 0;
};

// Memory of ours, and the peer's memory that it is written to.
struct Write {
  uint64_t from = 0;
  uint32_t lkey = 0;
  uint32_t num_bytes = 0;
  uint64_t to = 0;
  uint32_t rkey = 0;
};

// A reliable connection. Receives are for immediate data alone and have no memory.
class QueuePair {
 public:
  static constexpr uint64_t kReceiveId = uint64_t{1} << 32;  // wr_id of all receives

  // In the state INIT. The peer may do what both `access` and a memory region's access allow.
  QueuePair(const ProtectionDomain& domain, const CompletionQueue& cq, QueuePairSizes sizes,
            int port, uint16_t pkey_index, int access = ibv::kAccessRemoteWrite);

  uint32_t number() const { return qp_->qp_num; }
  uint32_t psn() const { return psn_; }  // number of our first packet
  // Brings the queue pair to the states RTR and RTS. `own` is its NIC, `peer` its other end.
  void Connect(const NicInfo& own, const Options& options, const NicPairInfo& peer);
  // To the error state: the NIC sends and receives nothing more, and flushes what was posted.
  void Kill();

  // All return errno. A write without an immediate has no completion; the wr_id of others is the
  // packed immediate.
  [[nodiscard]] int PostWrite(const Write& write) const;
  [[nodiscard]] int PostWrite(const Write& write, const Immediate& immediate) const;
  [[nodiscard]] int PostSend(ibv::SendWr& wr) const;
  [[nodiscard]] int PostReceive() const;

 private:
  int PostWrite(const Write& write, ibv::SendWr wr) const;
  void Modify(std::string_view state, ibv::QpAttr& attr, int mask);

  const Context& context_;
  int port_;
  const uint32_t psn_;
  Handle<ibv::Qp> qp_;
};

}  // namespace jaxhet::verbs

#endif  // XLA_PLUGIN_NET_VERBS_DEVICE_H_
