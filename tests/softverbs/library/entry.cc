// The entry points of VerbsApi, no more.

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>

#include "tests/softverbs/library/nic.h"
#include "xla_plugin/net/verbs/verbs_api.h"

namespace jaxhet::softverbs {
namespace {

constexpr int kMaxCqe = 1 << 15;

// The errno that a fault wants `call` to fail with, or 0.
int Refusal(Nic& nic, std::string_view call) {
  const Fault* const fault = nic.Take(FaultKind::kCall, FaultKind::kCall, call);
  return fault == nullptr ? 0 : fault->number;
}

std::nullptr_t Null(int error_number) {
  errno = error_number;
  return nullptr;
}

const Device& DeviceOf(const ibv::Context* context) {
  return *static_cast<const Device*>(context->device);
}

int PollCq(ibv::Cq* cq, int num_entries, ibv::Wc* wc) {
  if (num_entries < 0) return -1;
  return static_cast<Cq*>(cq)->Poll({wc, static_cast<size_t>(num_entries)});
}

int RequestNotify(ibv::Cq* cq, int /*only_solicited*/) {
  static_cast<Cq*>(cq)->Arm();
  return 0;
}

int PostSend(ibv::Qp* qp, ibv::SendWr* wr, ibv::SendWr** bad_wr) {
  Nic& nic = Nic::Get();
  const auto lock = nic.Lock();
  *bad_wr = wr;
  if (const int error = Refusal(nic, "ibv_post_send")) return error;
  return wr->next == nullptr ? nic.PostSend(*static_cast<Qp*>(qp), *wr) : EINVAL;
}

int PostReceive(ibv::Qp* qp, ibv::RecvWr* wr, ibv::RecvWr** bad_wr) {
  Nic& nic = Nic::Get();
  const auto lock = nic.Lock();
  *bad_wr = wr;
  if (const int error = Refusal(nic, "ibv_post_recv")) return error;
  return wr->next == nullptr ? Nic::PostReceive(*static_cast<Qp*>(qp), *wr) : EINVAL;
}

bool IsAccessGood(int access) {
  return (access & ibv::kAccessRemoteWrite) == 0 || (access & ibv::kAccessLocalWrite) != 0;
}

// Destroys an object that no other uses; returns an errno.
template <typename T, typename Base>
int Destroy(Base* base) {
  const auto lock = Nic::Get().Lock();
  const auto* const object = static_cast<const T*>(base);
  if (object->is_used()) return EBUSY;
  delete object;
  return 0;
}

}  // namespace
}  // namespace jaxhet::softverbs

// NOLINTBEGIN(readability-identifier-naming,misc-use-internal-linkage,misc-const-correctness): the
// names and signatures are verbs'.
using namespace jaxhet;             // NOLINT(google-build-using-namespace)
using namespace jaxhet::softverbs;  // NOLINT(google-build-using-namespace)

// The signature of an entry point must be the one by which VerbsApi calls it. Those that
// can fail begin with the fault that was ordered for them.
#define ENTRY(member, result, name, ...)                                                \
  extern "C" __attribute__((visibility("default"))) result name(__VA_ARGS__);           \
  static_assert(std::is_same_v<decltype(name), decltype(VerbsApi::member)::Signature>); \
  result name(__VA_ARGS__)

ENTRY(get_device_list, ibv::Device**, ibv_get_device_list, int* num_devices) {
  Nic& nic = Nic::Get();
  const auto lock = nic.Lock();
  if (num_devices != nullptr) *num_devices = 0;
  if (const int error = Refusal(nic, "ibv_get_device_list")) return Null(error);
  auto& devices = nic.devices();
  auto* const list = new ibv::Device*[devices.size() + 1]();
  std::ranges::transform(devices, list, [](Device& device) { return &device; });
  if (num_devices != nullptr) *num_devices = static_cast<int>(devices.size());
  return list;
}

ENTRY(free_device_list, void, ibv_free_device_list, ibv::Device** list) { delete[] list; }

ENTRY(get_device_name, const char*, ibv_get_device_name, ibv::Device* device) {
  return device->name.data();
}

ENTRY(open_device, ibv::Context*, ibv_open_device, ibv::Device* device) {
  Nic& nic = Nic::Get();
  const auto lock = nic.Lock();
  if (const int error = Refusal(nic, "ibv_open_device")) return Null(error);
  Context* const context = nic.Open(*static_cast<Device*>(device));
  context->ops.poll_cq = PollCq;
  context->ops.req_notify_cq = RequestNotify;
  context->ops.post_send = PostSend;
  context->ops.post_recv = PostReceive;
  return context;
}

ENTRY(close_device, int, ibv_close_device, ibv::Context* context) {
  Nic& nic = Nic::Get();
  auto lock = nic.Lock();
  return nic.Close(static_cast<Context*>(context), lock);
}

ENTRY(query_port, int, ibv_query_port, ibv::Context* context, uint8_t number, ibv::PortAttr* attr) {
  Nic& nic = Nic::Get();
  const auto lock = nic.Lock();
  if (const int error = Refusal(nic, "ibv_query_port")) return error;
  if (number != 1) return EINVAL;
  const Device& device = DeviceOf(context);
  *attr = {.state = device.is_up ? ibv::kPortActive : ibv::kPortDown,
           .max_mtu = ibv::kMtu4096,
           .active_mtu = ibv::kMtu4096,
           .gid_tbl_len = static_cast<int>(device.gids.size()),
           .pkey_tbl_len = 1,
           .link_layer = ibv::kLinkLayerEthernet};
  return 0;
}

ENTRY(query_gid_ex, int, _ibv_query_gid_ex, ibv::Context* context, uint32_t number, uint32_t index,
      ibv::GidEntry* entry, uint32_t flags, size_t size) {
  Nic& nic = Nic::Get();
  const auto lock = nic.Lock();
  if (const int error = Refusal(nic, "ibv_query_gid")) return error;
  if (number != 1 || flags != 0 || size != sizeof *entry) return EINVAL;
  const GidRow* const row = DeviceOf(context).FindGid(index);
  if (row == nullptr) return ENODATA;
  constexpr uint32_t kLoopback = 1;  // the addresses 127.0.0.*
  *entry = {.gid = row->gid,
            .gid_index = index,
            .port_num = number,
            .gid_type = row->type,
            .ndev_ifindex = kLoopback};
  return 0;
}

ENTRY(wc_status_str, const char*, ibv_wc_status_str, int status) {
  switch (status) {
    case ibv::kWcRetryExcErr:
      return "transport retry counter exceeded";
    case ibv::kWcRnrRetryExcErr:
      return "RNR retry counter exceeded";
    case ibv::kWcWrFlushErr:
      return "Work Request Flushed Error";
    case ibv::kWcRemAccessErr:
      return "remote access error";
    default:
      return "unknown";
  }
}

ENTRY(alloc_pd, ibv::Pd*, ibv_alloc_pd, ibv::Context* context) {
  Nic& nic = Nic::Get();
  const auto lock = nic.Lock();
  if (const int error = Refusal(nic, "ibv_alloc_pd")) return Null(error);
  auto* const pd = new Pd({static_cast<Context*>(context)});
  pd->context = context;
  pd->handle = 0;
  return pd;
}

ENTRY(dealloc_pd, int, ibv_dealloc_pd, ibv::Pd* pd) { return Destroy<Pd>(pd); }

ENTRY(reg_mr_iova2, ibv::Mr*, ibv_reg_mr_iova2, ibv::Pd* pd, void* address, size_t num_bytes,
      uint64_t iova, unsigned access) {
  Nic& nic = Nic::Get();
  const auto lock = nic.Lock();
  if (const int error = Refusal(nic, "ibv_reg_mr")) return Null(error);
  if (address == nullptr || num_bytes == 0) return Null(EFAULT);
  if (!IsAccessGood(static_cast<int>(access))) return Null(EINVAL);
  return nic.memory().Register(*static_cast<Pd*>(pd), address, num_bytes, iova,
                               static_cast<int>(access));
}

ENTRY(reg_dmabuf_mr, ibv::Mr*, ibv_reg_dmabuf_mr, ibv::Pd* pd, uint64_t offset, size_t num_bytes,
      uint64_t iova, int fd, int access) {
  Nic& nic = Nic::Get();
  const auto lock = nic.Lock();
  if (const int error = Refusal(nic, "ibv_reg_dmabuf_mr")) return Null(error);
  if (!IsAccessGood(access)) return Null(EINVAL);
  return nic.memory().RegisterDmabuf(*static_cast<Pd*>(pd), fd, offset, num_bytes, iova, access);
}

ENTRY(dereg_mr, int, ibv_dereg_mr, ibv::Mr* mr) {
  Nic& nic = Nic::Get();
  const auto lock = nic.Lock();
  nic.memory().Deregister(static_cast<Mr*>(mr));
  return 0;
}

ENTRY(create_comp_channel, ibv::CompChannel*, ibv_create_comp_channel, ibv::Context* context) {
  Nic& nic = Nic::Get();
  const auto lock = nic.Lock();
  if (const int error = Refusal(nic, "ibv_create_comp_channel")) return Null(error);
  auto* const channel = new CompChannel({static_cast<Context*>(context)});
  channel->context = context;
  channel->fd = channel->events.get();
  return channel;
}

ENTRY(destroy_comp_channel, int, ibv_destroy_comp_channel, ibv::CompChannel* channel) {
  return Destroy<CompChannel>(channel);
}

ENTRY(create_cq, ibv::Cq*, ibv_create_cq, ibv::Context* context, int cqe, void* cq_context,
      ibv::CompChannel* channel, int comp_vector) {
  Nic& nic = Nic::Get();
  const auto lock = nic.Lock();
  if (const int error = Refusal(nic, "ibv_create_cq")) return Null(error);
  auto* const events = static_cast<CompChannel*>(channel);
  if (cqe < 1 || cqe > kMaxCqe || comp_vector != 0 || events == nullptr || events->is_used()) {
    return Null(EINVAL);
  }
  auto* const cq = new Cq({static_cast<Context*>(context), events});
  static_cast<ibv::Cq&>(*cq) = {
      .context = context, .channel = channel, .cq_context = cq_context, .handle = 0, .cqe = cqe};
  return events->cq = cq;
}

// Where the real one would wait for ever, for events that were not acknowledged, this one refuses.
ENTRY(destroy_cq, int, ibv_destroy_cq, ibv::Cq* cq) {
  return static_cast<Cq*>(cq)->num_events_unacknowledged != 0 ? EBUSY : Destroy<Cq>(cq);
}

ENTRY(get_cq_event, int, ibv_get_cq_event, ibv::CompChannel* channel, ibv::Cq** cq,
      void** cq_context) {
  eventfd_t one = 0;
  if (eventfd_read(channel->fd, &one) != 0) return -1;
  Cq* const ready = static_cast<CompChannel*>(channel)->cq;
  ++ready->num_events_unacknowledged;
  *cq = ready;
  *cq_context = ready->cq_context;
  return 0;
}

ENTRY(ack_cq_events, void, ibv_ack_cq_events, ibv::Cq* cq, unsigned count) {
  static_cast<Cq*>(cq)->num_events_unacknowledged -= count;
}

ENTRY(create_qp, ibv::Qp*, ibv_create_qp, ibv::Pd* pd, ibv::QpInitAttr* init) {
  Nic& nic = Nic::Get();
  const auto lock = nic.Lock();
  if (const int error = Refusal(nic, "ibv_create_qp")) return Null(error);
  return nic.CreateQp(*static_cast<Pd*>(pd), *init);
}

ENTRY(modify_qp, int, ibv_modify_qp, ibv::Qp* qp, ibv::QpAttr* attr, int mask) {
  Nic& nic = Nic::Get();
  const auto lock = nic.Lock();
  if (const int error = Refusal(nic, "ibv_modify_qp")) return error;
  return Nic::ModifyQp(*static_cast<Qp*>(qp), *attr, mask);
}

ENTRY(destroy_qp, int, ibv_destroy_qp, ibv::Qp* qp) {
  Nic& nic = Nic::Get();
  const auto lock = nic.Lock();
  nic.DestroyQp(*static_cast<Qp*>(qp));
  return 0;
}

// NOLINTEND(readability-identifier-naming,misc-use-internal-linkage,misc-const-correctness)
