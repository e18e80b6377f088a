#ifndef XLA_PLUGIN_NET_VERBS_VERBS_ABI_H_
#define XLA_PLUGIN_NET_VERBS_VERBS_ABI_H_

#include <array>
#include <cstddef>
#include <cstdint>

// The values and structures of libibverbs that we use, declared here so that no rdma-core is needed
// to build. A comment beside a name is the system's; members have the system's names, enumerations
// are int; immediate data, GUIDs and PKeys are in network byte order.
// tests/python/test_verbs_declarations.py compares all of them with infiniband/verbs.h (44.0).
namespace jaxhet::ibv {

inline constexpr uint8_t kLinkLayerEthernet = 2;  // IBV_LINK_LAYER_ETHERNET

inline constexpr int kPortActive = 4;  // IBV_PORT_ACTIVE

inline constexpr int kAccessLocalWrite = 1;             // IBV_ACCESS_LOCAL_WRITE
inline constexpr int kAccessRemoteWrite = 1 << 1;       // IBV_ACCESS_REMOTE_WRITE
inline constexpr int kAccessRemoteRead = 1 << 2;        // IBV_ACCESS_REMOTE_READ
inline constexpr int kAccessRelaxedOrdering = 1 << 20;  // IBV_ACCESS_RELAXED_ORDERING

inline constexpr int kQpTypeRc = 2;  // IBV_QPT_RC

inline constexpr int kQpStateInit = 1;   // IBV_QPS_INIT
inline constexpr int kQpStateRtr = 2;    // IBV_QPS_RTR
inline constexpr int kQpStateRts = 3;    // IBV_QPS_RTS
inline constexpr int kQpStateError = 6;  // IBV_QPS_ERR

// Which members of a QpAttr ModifyQp reads and QueryQp fills.
inline constexpr int kQpState = 1 << 0;             // IBV_QP_STATE
inline constexpr int kQpAccessFlags = 1 << 3;       // IBV_QP_ACCESS_FLAGS
inline constexpr int kQpPkeyIndex = 1 << 4;         // IBV_QP_PKEY_INDEX
inline constexpr int kQpPort = 1 << 5;              // IBV_QP_PORT
inline constexpr int kQpAv = 1 << 7;                // IBV_QP_AV
inline constexpr int kQpPathMtu = 1 << 8;           // IBV_QP_PATH_MTU
inline constexpr int kQpTimeout = 1 << 9;           // IBV_QP_TIMEOUT
inline constexpr int kQpRetryCount = 1 << 10;       // IBV_QP_RETRY_CNT
inline constexpr int kQpRnrRetry = 1 << 11;         // IBV_QP_RNR_RETRY
inline constexpr int kQpRqPsn = 1 << 12;            // IBV_QP_RQ_PSN
inline constexpr int kQpMaxRdAtomic = 1 << 13;      // IBV_QP_MAX_QP_RD_ATOMIC
inline constexpr int kQpMinRnrTimer = 1 << 15;      // IBV_QP_MIN_RNR_TIMER
inline constexpr int kQpSqPsn = 1 << 16;            // IBV_QP_SQ_PSN
inline constexpr int kQpMaxDestRdAtomic = 1 << 17;  // IBV_QP_MAX_DEST_RD_ATOMIC
inline constexpr int kQpDestQpn = 1 << 20;          // IBV_QP_DEST_QPN

inline constexpr int kWrRdmaWrite = 0;         // IBV_WR_RDMA_WRITE
inline constexpr int kWrRdmaWriteWithImm = 1;  // IBV_WR_RDMA_WRITE_WITH_IMM
inline constexpr int kWrRdmaRead = 4;          // IBV_WR_RDMA_READ

inline constexpr unsigned kSendSignaled = 1 << 1;  // IBV_SEND_SIGNALED

inline constexpr int kWcSuccess = 0;  // IBV_WC_SUCCESS

struct alignas(uint64_t) Gid {  // ibv_gid
  std::array<uint8_t, 16> raw = {};
  bool operator==(const Gid&) const = default;
};

struct GidEntry {  // ibv_gid_entry
  Gid gid;
  uint32_t gid_index = 0;
  uint32_t port_num = 0;
  uint32_t gid_type = 0;
  uint32_t ndev_ifindex = 0;
};

// The entry point fills all but the last member, which is younger than it.
struct PortAttr {  // ibv_port_attr
  int state = 0;
  int max_mtu = 0;
  int active_mtu = 0;
  int gid_tbl_len = 0;
  uint32_t port_cap_flags = 0;
  uint32_t max_msg_sz = 0;
  uint32_t bad_pkey_cntr = 0;
  uint32_t qkey_viol_cntr = 0;
  uint16_t pkey_tbl_len = 0;
  uint16_t lid = 0;
  uint16_t sm_lid = 0;
  uint8_t lmc = 0;
  uint8_t max_vl_num = 0;
  uint8_t sm_sl = 0;
  uint8_t subnet_timeout = 0;
  uint8_t init_type_reply = 0;
  uint8_t active_width = 0;
  uint8_t active_speed = 0;
  uint8_t phys_state = 0;
  uint8_t link_layer = 0;
  uint8_t flags = 0;
  uint16_t port_cap_flags2 = 0;
};

struct GlobalRoute {  // ibv_global_route
  Gid dgid;
  uint32_t flow_label = 0;
  uint8_t sgid_index = 0;
  uint8_t hop_limit = 0;
  uint8_t traffic_class = 0;
};

struct AhAttr {  // ibv_ah_attr
  GlobalRoute grh;
  uint16_t dlid = 0;
  uint8_t sl = 0;
  uint8_t src_path_bits = 0;
  uint8_t static_rate = 0;
  uint8_t is_global = 0;
  uint8_t port_num = 0;
};

struct QpCap {  // ibv_qp_cap
  uint32_t max_send_wr = 0;
  uint32_t max_recv_wr = 0;
  uint32_t max_send_sge = 0;
  uint32_t max_recv_sge = 0;
  uint32_t max_inline_data = 0;
};

struct QpInitAttr {  // ibv_qp_init_attr
  void* qp_context = nullptr;
  struct Cq* send_cq = nullptr;
  struct Cq* recv_cq = nullptr;
  void* srq = nullptr;
  QpCap cap;
  int qp_type = kQpTypeRc;
  int sq_sig_all = 0;
};

struct QpAttr {  // ibv_qp_attr
  int qp_state = 0;
  int cur_qp_state = 0;
  int path_mtu = 0;
  int path_mig_state = 0;
  uint32_t qkey = 0;
  uint32_t rq_psn = 0;
  uint32_t sq_psn = 0;
  uint32_t dest_qp_num = 0;
  unsigned qp_access_flags = 0;
  QpCap cap;
  AhAttr ah_attr;
  AhAttr alt_ah_attr;
  uint16_t pkey_index = 0;
  uint16_t alt_pkey_index = 0;
  uint8_t en_sqd_async_notify = 0;
  uint8_t sq_draining = 0;
  uint8_t max_rd_atomic = 0;
  uint8_t max_dest_rd_atomic = 0;
  uint8_t min_rnr_timer = 0;
  uint8_t port_num = 0;
  uint8_t timeout = 0;
  uint8_t retry_cnt = 0;
  uint8_t rnr_retry = 0;
  uint8_t alt_port_num = 0;
  uint8_t alt_timeout = 0;
  uint32_t rate_limit = 0;
};

struct Sge {  // ibv_sge
  uint64_t addr = 0;
  uint32_t length = 0;
  uint32_t lkey = 0;
};

struct SendWr {  // ibv_send_wr
  uint64_t wr_id = 0;
  SendWr* next = nullptr;
  Sge* sg_list = nullptr;
  int num_sge = 0;
  int opcode = 0;
  unsigned send_flags = 0;
  uint32_t imm_data = 0;
  uint64_t remote_addr = 0;                        // wr.rdma.remote_addr
  uint32_t rkey = 0;                               // wr.rdma.rkey
  std::array<uint64_t, 9> for_other_opcodes = {};  // from wr.atomic.swap
};

struct RecvWr {  // ibv_recv_wr
  uint64_t wr_id = 0;
  RecvWr* next = nullptr;
  Sge* sg_list = nullptr;
  int num_sge = 0;
};

struct Wc {  // ibv_wc
  uint64_t wr_id = 0;
  int status = 0;
  // Undefined unless the status is success.
  int opcode = 0;
  uint32_t vendor_err = 0;
  uint32_t byte_len = 0;
  uint32_t imm_data = 0;
  uint32_t qp_num = 0;
  uint32_t src_qp = 0;
  unsigned wc_flags = 0;
  uint16_t pkey_index = 0;
  uint16_t slid = 0;
  uint8_t sl = 0;
  uint8_t dlid_path_bits = 0;
};

// Structures that the library allocates; never by value: some have more members than these.

struct Device {                   // ibv_device
  std::array<void*, 2> obsolete;  // _ops
  int node_type;
  int transport_type;
  std::array<char, 64> name;
  std::array<char, 64> dev_name;
  std::array<char, 256> dev_path;
  // Folder in sysfs: /sys/class/infiniband/NAME.
  std::array<char, 256> ibdev_path;
};

struct ContextOps {              // ibv_context_ops
  std::array<void*, 11> others;  // from _compat_query_device
  int (*poll_cq)(struct Cq* cq, int num_entries, Wc* wc);
  int (*req_notify_cq)(struct Cq* cq, int solicited_only);
  std::array<void*, 12> more_others;  // from _compat_cq_event
  int (*post_send)(struct Qp* qp, SendWr* wr, SendWr** bad_wr);
  int (*post_recv)(struct Qp* qp, RecvWr* wr, RecvWr** bad_wr);
  std::array<void*, 5> last_others;  // from _compat_create_ah
};

struct Context {  // ibv_context, first members
  Device* device;
  ContextOps ops;
  int cmd_fd;
  int async_fd;
  int num_comp_vectors;
};

struct Pd {  // ibv_pd
  Context* context;
  uint32_t handle;
};

struct Mr {  // ibv_mr
  Context* context;
  Pd* pd;
  void* addr;
  size_t length;
  uint32_t handle;
  uint32_t lkey;
  uint32_t rkey;
};

struct CompChannel {  // ibv_comp_channel
  Context* context;
  int fd;
  int refcnt;
};

struct Cq {  // ibv_cq, first members
  Context* context;
  CompChannel* channel;
  void* cq_context;
  uint32_t handle;
  int cqe;
};

struct Qp {  // ibv_qp, first members
  Context* context;
  void* qp_context;
  Pd* pd;
  Cq* send_cq;
  Cq* recv_cq;
  void* srq;
  uint32_t handle;
  uint32_t qp_num;
  int state;
  int qp_type;
};

}  // namespace jaxhet::ibv

#endif  // XLA_PLUGIN_NET_VERBS_VERBS_ABI_H_
