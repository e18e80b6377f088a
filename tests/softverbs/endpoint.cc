#include "tests/softverbs/endpoint.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <span>
#include <thread>
#include <utility>

#include "tests/cpp/testing.h"
#include "tests/softverbs/softverbs.h"
#include "xla_plugin/base/error.h"

namespace jaxhet::testing {
namespace {

void Check(bool is_good, std::string_view what) {
  if (!is_good) ThrowErrno(what);
}

ibv::Context* Open(std::string_view name) {
  int count = 0;
  ibv::Device** const list = Verbs().get_device_list(&count);
  Check(list != nullptr, "ibv_get_device_list");
  ibv::Context* context = nullptr;
  for (ibv::Device* const device : std::span(list, static_cast<size_t>(count))) {
    if (Verbs().get_device_name(device) == name) context = Verbs().open_device(device);
  }
  Verbs().free_device_list(list);
  Check(context != nullptr, "ibv_open_device");
  return context;
}

}  // namespace

const VerbsApi& Verbs() {
  static const auto* const verbs = [] {
    Softverbs::Get();
    return new VerbsApi(LoadVerbs());
  }();
  return *verbs;
}

Endpoint::Endpoint(const Options& options)
    : options_(options),
      context_(Open(options.device)),
      pd_(Verbs().alloc_pd(context_)),
      bytes_(options.num_bytes),
      mr_(Verbs().reg_mr_iova2(pd_, bytes_.data(), bytes_.size(),
                               reinterpret_cast<uintptr_t>(bytes_.data()),
                               static_cast<unsigned>(options.access))),
      channel_(Verbs().create_comp_channel(context_)),
      cq_(Verbs().create_cq(context_, options.cqe, this, channel_, 0)) {
  if (pd_ == nullptr || mr_ == nullptr || channel_ == nullptr || cq_ == nullptr) Refuse("set-up");
  ibv::QpInitAttr init;
  init.send_cq = init.recv_cq = cq_;
  init.cap = {.max_send_wr = options.depth,
              .max_recv_wr = options.depth,
              .max_send_sge = 2,
              .max_recv_sge = 1,
              .max_inline_data = 64};
  qp_ = Verbs().create_qp(pd_, &init);
  if (qp_ == nullptr) Refuse("ibv_create_qp");
}

Endpoint::~Endpoint() { Release(); }

void Endpoint::Release() {
  if (qp_ != nullptr) {
    EXPECT_EQ(Verbs().destroy_qp(qp_), 0);
  }
  if (cq_ != nullptr) {
    EXPECT_EQ(Verbs().destroy_cq(cq_), 0);
  }
  if (channel_ != nullptr) {
    EXPECT_EQ(Verbs().destroy_comp_channel(channel_), 0);
  }
  if (mr_ != nullptr) {
    EXPECT_EQ(Verbs().dereg_mr(mr_), 0);
  }
  if (pd_ != nullptr) {
    EXPECT_EQ(Verbs().dealloc_pd(pd_), 0);
  }
  EXPECT_EQ(Verbs().close_device(context_), 0);
}

void Endpoint::Refuse(std::string_view what) {
  const int error_number = errno;
  Release();
  errno = error_number;
  ThrowErrno(what);
}

EndpointInfo Endpoint::info() const {
  EndpointInfo info{.qpn = qp_->qp_num,
                    .rkey = mr_->rkey,
                    .address = reinterpret_cast<uintptr_t>(bytes_.data()),
                    .gid = {}};
  Check(Verbs().query_gid(context_, 1, options_.gid_index, &info.gid) == 0, "ibv_query_gid");
  return info;
}

void Endpoint::ToInit() {
  ibv::QpAttr attr;
  attr.qp_state = ibv::kQpStateInit;
  attr.port_num = 1;
  attr.qp_access_flags = ibv::kAccessRemoteWrite | ibv::kAccessRemoteRead;
  EXPECT_EQ(Modify(attr, ibv::kQpState | ibv::kQpPkeyIndex | ibv::kQpPort | ibv::kQpAccessFlags),
            0);
}

void Endpoint::ToReadyToReceive(const EndpointInfo& peer) {
  ibv::QpAttr attr;
  attr.qp_state = ibv::kQpStateRtr;
  attr.path_mtu = ibv::kMtu4096;
  attr.dest_qp_num = peer.qpn;
  attr.rq_psn = 7;
  attr.max_dest_rd_atomic = 1;
  attr.min_rnr_timer = 1;
  attr.ah_attr.is_global = 1;
  attr.ah_attr.port_num = 1;
  attr.ah_attr.grh.dgid = peer.gid;
  attr.ah_attr.grh.sgid_index = static_cast<uint8_t>(options_.gid_index);
  EXPECT_EQ(Modify(attr, ibv::kQpState | ibv::kQpAv | ibv::kQpPathMtu | ibv::kQpDestQpn |
                             ibv::kQpRqPsn | ibv::kQpMaxDestRdAtomic | ibv::kQpMinRnrTimer),
            0);
}

void Endpoint::ToReadyToSend() {
  ibv::QpAttr attr;
  attr.qp_state = ibv::kQpStateRts;
  attr.timeout = 14;
  attr.retry_cnt = 3;
  attr.rnr_retry = options_.rnr_retry;
  attr.sq_psn = 7;
  attr.max_rd_atomic = 1;
  EXPECT_EQ(Modify(attr, ibv::kQpState | ibv::kQpTimeout | ibv::kQpRetryCount | ibv::kQpRnrRetry |
                             ibv::kQpSqPsn | ibv::kQpMaxRdAtomic),
            0);
}

void Endpoint::Connect(const EndpointInfo& peer) {
  ToInit();
  ToReadyToReceive(peer);
  ToReadyToSend();
}

int Endpoint::State() {
  ibv::QpAttr attr;
  ibv::QpInitAttr init;
  EXPECT_EQ(Verbs().query_qp(qp_, &attr, ibv::kQpState, &init), 0);
  return attr.qp_state;
}

ibv::Sge Endpoint::SgeOf(size_t offset, size_t num_bytes) {
  return {.addr = reinterpret_cast<uintptr_t>(bytes_.data() + offset),
          .length = static_cast<uint32_t>(num_bytes),
          .lkey = mr_->lkey};
}

int Endpoint::Post(ibv::SendWr wr, ibv::Sge sge) {
  wr.sg_list = &sge;
  wr.num_sge = sge.length == 0 ? 0 : 1;
  ibv::SendWr* bad = nullptr;
  return VerbsApi::PostSend(qp_, &wr, &bad);
}

int Endpoint::Write(const EndpointInfo& peer, size_t offset, size_t num_bytes, int64_t imm,
                    uint64_t wr_id, unsigned flags) {
  ibv::SendWr wr;
  wr.wr_id = wr_id;
  wr.opcode = imm < 0 ? ibv::kWrRdmaWrite : ibv::kWrRdmaWriteWithImm;
  wr.send_flags = flags;
  wr.imm_data = imm < 0 ? 0 : static_cast<uint32_t>(imm);
  wr.remote_addr = peer.address + offset;
  wr.rkey = peer.rkey;
  return Post(wr, SgeOf(offset, num_bytes));
}

int Endpoint::Read(const EndpointInfo& peer, size_t offset, size_t num_bytes) {
  ibv::SendWr wr;
  wr.opcode = ibv::kWrRdmaRead;
  wr.send_flags = ibv::kSendSignaled;
  wr.remote_addr = peer.address + offset;
  wr.rkey = peer.rkey;
  return Post(wr, SgeOf(offset, num_bytes));
}

int Endpoint::Send(size_t offset, size_t num_bytes, unsigned flags) {
  ibv::SendWr wr;
  wr.opcode = ibv::kWrSend;
  wr.send_flags = flags;
  return Post(wr, SgeOf(offset, num_bytes));
}

int Endpoint::Receive(uint64_t wr_id, size_t offset, size_t num_bytes) {
  ibv::Sge sge = SgeOf(offset, num_bytes);
  ibv::RecvWr wr;
  wr.wr_id = wr_id;
  wr.sg_list = &sge;
  wr.num_sge = num_bytes == 0 ? 0 : 1;
  ibv::RecvWr* bad = nullptr;
  return VerbsApi::PostRecv(qp_, &wr, &bad);
}

ibv::Wc Endpoint::Wait(std::chrono::milliseconds limit) {
  const auto end = std::chrono::steady_clock::now() + limit;
  ibv::Wc wc;
  while (std::chrono::steady_clock::now() < end) {
    const int count = VerbsApi::PollCq(cq_, 1, &wc);
    if (count == 1) return wc;
    if (count < 0) break;
    std::this_thread::yield();
  }
  ADD_FAILURE() << "no completion";
  wc.status = -1;
  return wc;
}

bool Endpoint::HasCompletion() {
  ibv::Wc wc;
  return VerbsApi::PollCq(cq_, 1, &wc) != 0;
}

int Endpoint::WaitEvent(std::chrono::milliseconds limit) {
  pollfd ready{.fd = context_->async_fd, .events = POLLIN, .revents = 0};
  if (poll(&ready, 1, static_cast<int>(limit.count())) != 1) return -1;
  ibv::AsyncEvent event;
  if (Verbs().get_async_event(context_, &event) != 0) return -1;
  Verbs().ack_async_event(&event);
  return event.event_type;
}

}  // namespace jaxhet::testing
