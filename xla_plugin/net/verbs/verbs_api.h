#ifndef XLA_PLUGIN_NET_VERBS_VERBS_API_H_
#define XLA_PLUGIN_NET_VERBS_VERBS_API_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "xla_plugin/base/error.h"
#include "xla_plugin/base/library.h"
#include "xla_plugin/net/verbs/verbs_abi.h"

namespace jaxhet {

inline constexpr std::array kVerbsLibraries = {"libibverbs.so.1"};

// The entry points of libibverbs that we use, loaded at run time.
struct VerbsApi {
  Library library;

  // NULL and errno ENOSYS where the kernel has no RDMA.
  Function<ibv::Device**(int*)> get_device_list{library, "ibv_get_device_list"};
  Function<void(ibv::Device**)> free_device_list{library, "ibv_free_device_list"};
  Function<const char*(ibv::Device*)> get_device_name{library, "ibv_get_device_name"};
  Function<ibv::Context*(ibv::Device*)> open_device{library, "ibv_open_device"};
  Function<int(ibv::Context*)> close_device{library, "ibv_close_device"};
  Function<int(ibv::Context*, uint8_t, ibv::PortAttr*)> query_port{library, "ibv_query_port"};
  Function<const char*(int)> wc_status_str{library, "ibv_wc_status_str"};

  Function<ibv::Pd*(ibv::Context*)> alloc_pd{library, "ibv_alloc_pd"};
  Function<int(ibv::Pd*)> dealloc_pd{library, "ibv_dealloc_pd"};
  Function<int(ibv::Mr*)> dereg_mr{library, "ibv_dereg_mr"};

  Function<ibv::CompChannel*(ibv::Context*)> create_comp_channel{library,
                                                                 "ibv_create_comp_channel"};
  Function<int(ibv::CompChannel*)> destroy_comp_channel{library, "ibv_destroy_comp_channel"};
  Function<int(ibv::CompChannel*, ibv::Cq**, void**)> get_cq_event{library, "ibv_get_cq_event"};
  Function<void(ibv::Cq*, unsigned)> ack_cq_events{library, "ibv_ack_cq_events"};
  Function<ibv::Cq*(ibv::Context*, int, void*, ibv::CompChannel*, int)> create_cq{library,
                                                                                  "ibv_create_cq"};
  Function<int(ibv::Cq*)> destroy_cq{library, "ibv_destroy_cq"};

  Function<ibv::Qp*(ibv::Pd*, ibv::QpInitAttr*)> create_qp{library, "ibv_create_qp"};
  Function<int(ibv::Qp*, ibv::QpAttr*, int)> modify_qp{library, "ibv_modify_qp"};
  Function<int(ibv::Qp*)> destroy_qp{library, "ibv_destroy_qp"};

  // Since version 34 of rdma-core (2021).
  Function<ibv::Mr*(ibv::Pd*, void*, size_t, uint64_t, unsigned)> reg_mr_iova2{library,
                                                                               "ibv_reg_mr_iova2"};
  Function<ibv::Mr*(ibv::Pd*, uint64_t, size_t, uint64_t, int, int)> reg_dmabuf_mr{
      library, "ibv_reg_dmabuf_mr"};
  Function<int(ibv::Context*, uint32_t, uint32_t, ibv::GidEntry*, uint32_t, size_t)> query_gid_ex{
      library, "_ibv_query_gid_ex"};

  // Inline functions in the system's header. They return errno, or poll_cq a number of entries,
  // negative on failure.
  static int PollCq(ibv::Cq* cq, int num_entries, ibv::Wc* wc) {
    return cq->context->ops.poll_cq(cq, num_entries, wc);
  }
  static int RequestNotify(ibv::Cq* cq) { return cq->context->ops.req_notify_cq(cq, 0); }
  static int PostSend(ibv::Qp* qp, ibv::SendWr* wr, ibv::SendWr** bad_wr) {
    return qp->context->ops.post_send(qp, wr, bad_wr);
  }
  static int PostRecv(ibv::Qp* qp, ibv::RecvWr* wr, ibv::RecvWr** bad_wr) {
    return qp->context->ops.post_recv(qp, wr, bad_wr);
  }
};

// Throws TransportError, with the loader's words, if the library is not there or too old.
inline VerbsApi LoadVerbs(std::span<const char* const> names = kVerbsLibraries) {
  return VerbsApi{Library(names, ErrorCode::kTransport)};
}

}  // namespace jaxhet

#endif  // XLA_PLUGIN_NET_VERBS_VERBS_API_H_
