#include <cerrno>
#include <cstring>
#include <utility>

#include "tests/softverbs/library/nic.h"
#include "tests/softverbs/library/qp_state.h"

namespace jaxhet::softverbs {
namespace {

constexpr uint32_t kMaxWr = 1 << 14;
constexpr uint32_t kMaxSge = 16;

std::vector<ibv::Sge> CopySges(const ibv::Sge* list, int count) { return {list, list + count}; }

int OpcodeOf(const Work& work) {
  switch (work.opcode) {
    case ibv::kWrRdmaRead:
      return ibv::kWcRdmaRead;
    case ibv::kWrRdmaWrite:
    case ibv::kWrRdmaWriteWithImm:
      return ibv::kWcRdmaWrite;
    default:
      return ibv::kWcSend;
  }
}

}  // namespace

Qp* Nic::CreateQp(Pd& pd, const ibv::QpInitAttr& init) {
  const auto* const model = static_cast<Context*>(pd.context)->model;
  const ibv::QpCap& cap = init.cap;
  const bool fits = cap.max_send_wr <= kMaxWr && cap.max_recv_wr <= kMaxWr &&
                    cap.max_send_sge <= kMaxSge && cap.max_recv_sge <= kMaxSge &&
                    cap.max_inline_data <= model->max_inline;
  if (!fits || init.qp_type != ibv::kQpTypeRc || init.srq != nullptr || init.send_cq == nullptr ||
      init.recv_cq == nullptr || qps_.size() + 1 >= kQpsOfProcess) {
    errno = EINVAL;
    return nullptr;
  }
  do {
    last_qpn_ = (last_qpn_ + 1) % kQpsOfProcess;
  } while (last_qpn_ == 0 || qps_.contains(wire_.process() * kQpsOfProcess + last_qpn_));
  auto* const qp = new Qp;
  static_cast<ibv::Qp&>(*qp) = {.context = pd.context,
                                .qp_context = init.qp_context,
                                .pd = &pd,
                                .send_cq = init.send_cq,
                                .recv_cq = init.recv_cq,
                                .srq = nullptr,
                                .handle = last_qpn_,
                                .qp_num = wire_.process() * kQpsOfProcess + last_qpn_,
                                .state = ibv::kQpStateReset,
                                .qp_type = ibv::kQpTypeRc};
  qp->init = init;
  ++pd.num_objects;
  ++static_cast<Cq*>(init.send_cq)->num_qps;
  ++static_cast<Cq*>(init.recv_cq)->num_qps;
  return qps_[qp->qp_num] = qp;
}

int Nic::DestroyQp(Qp& qp) {
  for (ibv::Cq* const cq : {qp.send_cq, qp.recv_cq}) {
    static_cast<Cq*>(cq)->Orphan(qp);
    --static_cast<Cq*>(cq)->num_qps;
  }
  --static_cast<Pd*>(qp.pd)->num_objects;
  qps_.erase(qp.qp_num);
  delete &qp;
  return 0;
}

int Nic::ModifyQp(Qp& qp, const ibv::QpAttr& attr, int mask) {
  const auto* const model = static_cast<Context*>(qp.context)->model;
  const int error = CheckModify(qp.now, attr, mask, *model, qp.attr.port_num);
  if (error != 0) return error;
  const bool sets_state = (mask & ibv::kQpState) != 0;
  if (sets_state && attr.qp_state == ibv::kQpStateReset) {
    static_cast<Cq*>(qp.send_cq)->Forget(qp);
    static_cast<Cq*>(qp.recv_cq)->Forget(qp);
    qp.sends.clear();
    qp.receives.clear();
    qp.sends_retired = qp.sends_posted;
    qp.receives_retired = qp.receives_posted;
    qp.offset = 0;
    qp.is_waiting = false;
    qp.wake_at = {};
  }
  ApplyModify(qp, attr, mask);
  if (sets_state && attr.qp_state == ibv::kQpStateError) Flush(qp);
  return 0;
}

int Nic::PostSend(Qp& qp, const ibv::SendWr& request) {
  const ibv::QpCap& cap = qp.init.cap;
  if (qp.now < ibv::kQpStateRts || request.num_sge < 0 ||
      std::cmp_greater(request.num_sge, cap.max_send_sge) || request.opcode < 0 ||
      request.opcode > ibv::kWrRdmaRead) {
    return EINVAL;
  }
  if (qp.sends_posted - qp.sends_retired >= cap.max_send_wr) return ENOMEM;
  Work work;
  work.wr_id = request.wr_id;
  work.index = qp.sends_posted;
  work.opcode = request.opcode;
  work.flags = request.send_flags;
  work.imm_data = request.imm_data;
  work.remote_addr = request.remote_addr;
  work.rkey = request.rkey;
  work.sges = CopySges(request.sg_list, request.num_sge);
  for (const ibv::Sge& sge : work.sges) work.length += sge.length;
  if ((request.send_flags & ibv::kSendInline) != 0) {
    if (work.length > cap.max_inline_data || work.opcode == ibv::kWrRdmaRead) return EINVAL;
    for (const ibv::Sge& sge : work.sges) {
      const auto* const bytes = reinterpret_cast<const std::byte*>(sge.addr);
      work.inline_bytes.insert(work.inline_bytes.end(), bytes, bytes + sge.length);
    }
  }
  ++qp.sends_posted;
  qp.sends.push_back(std::move(work));
  if (qp.now != ibv::kQpStateRts) Flush(qp);
  Wake();
  return 0;
}

int Nic::PostReceive(Qp& qp, const ibv::RecvWr& request) {
  const ibv::QpCap& cap = qp.init.cap;
  if (qp.now == ibv::kQpStateReset || request.num_sge < 0 ||
      std::cmp_greater(request.num_sge, cap.max_recv_sge)) {
    return EINVAL;
  }
  if (qp.receives_posted - qp.receives_retired >= cap.max_recv_wr) return ENOMEM;
  qp.receives.push_back({.wr_id = request.wr_id,
                         .index = qp.receives_posted++,
                         .sges = CopySges(request.sg_list, request.num_sge)});
  if (qp.now == ibv::kQpStateError) Flush(qp);
  return 0;
}

void Nic::AddCompletion(Qp& qp, bool is_receive, const Completion& completion, bool is_solicited) {
  auto* const cq = static_cast<Cq*>(is_receive ? qp.recv_cq : qp.send_cq);
  if (cq->Add(completion, is_solicited || completion.wc.status != ibv::kWcSuccess)) return;
  if (std::exchange(cq->overrun_is_told, true)) return;
  for (auto& [qpn, other] : qps_) {
    if (other->send_cq == cq || other->recv_cq == cq) Break(*other);
  }
}

void Nic::CompleteSend(Qp& qp, int status) {
  const Work work = std::move(qp.sends.front());
  qp.sends.pop_front();
  qp.offset = 0;
  const bool is_signaled = (work.flags & ibv::kSendSignaled) != 0 || qp.init.sq_sig_all != 0;
  if (status == ibv::kWcSuccess && !is_signaled) return;
  ibv::Wc wc{.wr_id = work.wr_id, .status = status, .opcode = OpcodeOf(work)};
  wc.qp_num = qp.qp_num;
  if (work.opcode == ibv::kWrRdmaRead) wc.byte_len = static_cast<uint32_t>(work.length);
  AddCompletion(qp, false, {.wc = wc, .qp = &qp, .retires = work.index + 1}, false);
}

void Nic::CompleteReceive(Qp& qp, ibv::Wc wc, bool is_solicited) {
  const ReceiveWork work = std::move(qp.receives.front());
  qp.receives.pop_front();
  wc.wr_id = work.wr_id;
  wc.qp_num = qp.qp_num;
  AddCompletion(qp, true, {.wc = wc, .qp = &qp, .retires = work.index + 1}, is_solicited);
}

void Nic::Flush(Qp& qp) {
  qp.is_waiting = false;
  while (!qp.sends.empty()) CompleteSend(qp, ibv::kWcWrFlushErr);
  while (!qp.receives.empty()) {
    CompleteReceive(qp, {.status = ibv::kWcWrFlushErr, .opcode = ibv::kWcRecv}, false);
  }
}

void Nic::Break(Qp& qp) {
  if (qp.now == ibv::kQpStateError) return;
  qp.now = ibv::kQpStateError;
  Flush(qp);
}

}  // namespace jaxhet::softverbs
