#include "xla_plugin/net/verbs/device.h"

#include <arpa/inet.h>
#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <random>

#include "xla_plugin/base/checked.h"

namespace jaxhet::verbs {
namespace {

constexpr std::string_view kMemlockAdvice =
    ". The process may lock too little memory: raise `ulimit -l` to unlimited (in a container "
    "`--ulimit memlock=-1`, under systemd LimitMEMLOCK=infinity).";

// Registered memory, CQs and QPs first meet the limit of locked memory.
std::string_view AdviceFor(int error_number) {
  return error_number == ENOMEM ? kMemlockAdvice : std::string_view();
}

// Calls that make something return null and set errno.
template <typename T>
T* Made(T* object, std::string_view call, std::string_view where) {
  const int error_number = errno;
  if (object == nullptr) ThrowCall(call, where, error_number, AdviceFor(error_number));
  return object;
}

void SetNonBlocking(int fd) {
  const int flags = fcntl(fd, F_GETFL);
  if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0) ThrowErrno("fcntl(F_SETFL)");
}

ibv::Mr* Register(const ProtectionDomain& domain, std::span<std::byte> memory, int access,
                  const DmaBuf* dma_buf) {
  const VerbsApi& api = domain.context().api();
  // Completion is taken from the CQ alone, never from the memory, so that writes may pass each
  // other on their way to it. Devices that can't do that ignore the flag.
  access |= ibv::kAccessRelaxedOrdering;
  const auto address = reinterpret_cast<uint64_t>(memory.data());
  if (dma_buf != nullptr) {
    return api.reg_dmabuf_mr(domain.get(), dma_buf->offset, memory.size(), address,
                             dma_buf->fd.get(), access);
  }
  return api.reg_mr_iova2(domain.get(), memory.data(), memory.size(), address,
                          static_cast<unsigned>(access));
}

uint32_t RandomPsn() { return std::random_device()() & 0xff'ffff; }

ibv::Qp* CreateQp(const ProtectionDomain& domain, const CompletionQueue& cq, QueuePairSizes sizes) {
  ibv::QpInitAttr attr;
  attr.send_cq = attr.recv_cq = cq.get();
  attr.cap.max_send_wr = sizes.sends;
  attr.cap.max_recv_wr = sizes.receives;
  attr.cap.max_send_sge = 1;
  attr.cap.max_recv_sge = 1;
  return domain.context().api().create_qp(domain.get(), &attr);
}

}  // namespace

void ThrowCall(std::string_view call, std::string_view where, int error_number,
               std::string_view advice) {
  Throw(ErrorCode::kTransport, ErrnoText(StrCat(call, " on ", where), error_number), advice);
}

std::string Describe(const VerbsApi& api, const ibv::Wc& wc) {
  return StrCat(api.wc_status_str(wc.status), " (status ", wc.status, ", vendor error ",
                wc.vendor_err, ")");
}

Context::Context(const VerbsApi& api, ibv::Device* device)
    : api_(api),
      name_(api.get_device_name(device)),
      context_(Made(api.open_device(device), "ibv_open_device", name_), api.close_device) {}

bool Context::HasPort(int port) const {
  ibv::PortAttr attr;
  return api_.query_port(get(), CheckedCast<uint8_t>(port), &attr) == 0;
}

ibv::PortAttr Context::QueryPort(int port) const {
  ibv::PortAttr attr;
  if (const int error = api_.query_port(get(), CheckedCast<uint8_t>(port), &attr)) {
    ThrowCall("ibv_query_port", StrCat(name_, ":", port), error);
  }
  return attr;
}

ProtectionDomain::ProtectionDomain(const Context& context)
    : context_(context),
      pd_(Made(context.api().alloc_pd(context.get()), "ibv_alloc_pd", context.name()),
          context.api().dealloc_pd) {}

MemoryRegion::MemoryRegion(const ProtectionDomain& domain, std::span<std::byte> memory, int access,
                           const DmaBuf* dma_buf)
    : mr_(Made(Register(domain, memory, access, dma_buf),
               StrCat(dma_buf == nullptr ? "ibv_reg_mr" : "ibv_reg_dmabuf_mr", " of ",
                      memory.size(), " bytes"),
               domain.context().name()),
          domain.context().api().dereg_mr) {}

CompletionQueue::CompletionQueue(const Context& context, int num_entries)
    : context_(context),
      channel_(Made(context.api().create_comp_channel(context.get()), "ibv_create_comp_channel",
                    context.name()),
               context.api().destroy_comp_channel),
      cq_(Made(context.api().create_cq(context.get(), num_entries, nullptr, channel_.get(), 0),
               "ibv_create_cq", context.name()),
          context.api().destroy_cq) {
  SetNonBlocking(fd());
}

std::span<const ibv::Wc> CompletionQueue::Poll(std::span<ibv::Wc> buffer,
                                               std::string_view path) const {
  const int count = VerbsApi::PollCq(get(), static_cast<int>(buffer.size()), buffer.data());
  if (count < 0) {
    Throw(ErrorCode::kTransport, "ibv_poll_cq on ", path, " failed: the completion queue was ",
          "overrun, or the NIC is gone. See the kernel's log; choose other NICs with ",
          "JAXHET_VERBS_DEVICES. If the NIC is there, please report it.");
  }
  return buffer.first(static_cast<size_t>(count));
}

bool CompletionQueue::Arm() {
  if (armed_) return false;
  if (const int error = VerbsApi::RequestNotify(get())) {
    ThrowCall("ibv_req_notify_cq", context_.name(), error);
  }
  return armed_ = true;
}

void CompletionQueue::OnEvents(uint32_t /*events*/) {
  const VerbsApi& api = context_.api();
  ibv::Cq* cq = nullptr;
  void* ignored = nullptr;
  unsigned num_events = 0;
  while (api.get_cq_event(channel_.get(), &cq, &ignored) == 0) ++num_events;
  if (num_events == 0) return;
  api.ack_cq_events(get(), num_events);
  armed_ = false;
}

QueuePair::QueuePair(const ProtectionDomain& domain, const CompletionQueue& cq,
                     QueuePairSizes sizes, int port, uint16_t pkey_index, int access)
    : context_(domain.context()),
      port_(port),
      psn_(RandomPsn()),
      qp_(Made(CreateQp(domain, cq, sizes), "ibv_create_qp", context_.name()),
          context_.api().destroy_qp) {
  ibv::QpAttr attr;
  attr.qp_state = ibv::kQpStateInit;
  attr.pkey_index = pkey_index;
  attr.port_num = CheckedCast<uint8_t>(port);
  attr.qp_access_flags = static_cast<unsigned>(access);
  Modify("INIT", attr, ibv::kQpState | ibv::kQpPkeyIndex | ibv::kQpPort | ibv::kQpAccessFlags);
}

void QueuePair::Connect(const NicInfo& own, const Options& options, const NicPairInfo& peer) {
  ibv::QpAttr attr;
  attr.qp_state = ibv::kQpStateRtr;
  attr.path_mtu = std::min(own.mtu, static_cast<int>(peer.mtu));
  attr.dest_qp_num = peer.qp_num;
  attr.rq_psn = peer.psn;
  attr.max_dest_rd_atomic = 1;
  attr.min_rnr_timer = 12;  // 0.64 ms
  attr.ah_attr.dlid = peer.lid;
  attr.ah_attr.sl = static_cast<uint8_t>(options.service_level);
  attr.ah_attr.port_num = CheckedCast<uint8_t>(port_);
  attr.ah_attr.is_global = own.is_infiniband ? 0 : 1;
  attr.ah_attr.grh.dgid.raw = peer.gid;
  attr.ah_attr.grh.sgid_index = static_cast<uint8_t>(own.gid.index);
  attr.ah_attr.grh.hop_limit = 255;
  attr.ah_attr.grh.traffic_class = static_cast<uint8_t>(options.traffic_class);
  Modify("RTR", attr,
         ibv::kQpState | ibv::kQpAv | ibv::kQpPathMtu | ibv::kQpDestQpn | ibv::kQpRqPsn |
             ibv::kQpMaxDestRdAtomic | ibv::kQpMinRnrTimer);
  attr = {};
  attr.qp_state = ibv::kQpStateRts;
  attr.sq_psn = psn_;
  attr.timeout = static_cast<uint8_t>(options.timeout);
  attr.retry_cnt = static_cast<uint8_t>(options.retries);
  attr.rnr_retry = 7;  // for ever: receives are stocked to the credits, so that it does not happen
  attr.max_rd_atomic = 1;
  Modify("RTS", attr,
         ibv::kQpState | ibv::kQpTimeout | ibv::kQpRetryCount | ibv::kQpRnrRetry | ibv::kQpSqPsn |
             ibv::kQpMaxRdAtomic);
}

void QueuePair::Kill() {
  ibv::QpAttr attr;
  attr.qp_state = ibv::kQpStateError;
  context_.api().modify_qp(qp_.get(), &attr, ibv::kQpState);  // fails only for a NIC that is gone
}

void QueuePair::Modify(std::string_view state, ibv::QpAttr& attr, int mask) {
  const int error = context_.api().modify_qp(qp_.get(), &attr, mask);
  if (error == 0) return;
  ThrowCall(StrCat("ibv_modify_qp(", state, ")"), StrCat(context_.name(), ":", port_), error,
            error == ETIMEDOUT || error == EINVAL || error == ENETUNREACH || error == EHOSTUNREACH
                ? ". Check the GIDs of both ends (JAXHET_VERBS_GID_INDEX), the route between them "
                  "and the PKey."
                : "");
}

int QueuePair::PostSend(ibv::SendWr& wr) const {
  ibv::SendWr* bad = nullptr;
  return VerbsApi::PostSend(qp_.get(), &wr, &bad);
}

int QueuePair::PostWrite(const Write& write, ibv::SendWr wr) const {
  ibv::Sge sge{.addr = write.from, .length = write.num_bytes, .lkey = write.lkey};
  wr.sg_list = &sge;
  wr.num_sge = write.num_bytes > 0 ? 1 : 0;
  wr.remote_addr = write.to;
  wr.rkey = write.rkey;
  return PostSend(wr);
}

int QueuePair::PostWrite(const Write& write) const {
  ibv::SendWr wr;
  wr.opcode = ibv::kWrRdmaWrite;
  return PostWrite(write, wr);
}

int QueuePair::PostWrite(const Write& write, const Immediate& immediate) const {
  ibv::SendWr wr;
  wr.wr_id = Pack(immediate);
  wr.opcode = ibv::kWrRdmaWriteWithImm;
  wr.imm_data = htonl(Pack(immediate));
  wr.send_flags = ibv::kSendSignaled;
  return PostWrite(write, wr);
}

int QueuePair::PostReceive() const {
  ibv::RecvWr wr;
  wr.wr_id = kReceiveId;
  ibv::RecvWr* bad = nullptr;
  return VerbsApi::PostRecv(qp_.get(), &wr, &bad);
}

}  // namespace jaxhet::verbs
