#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "tests/softverbs/library/nic.h"

namespace jaxhet::softverbs {
namespace {

constexpr uint32_t kMaxWr = 1 << 14;
constexpr std::chrono::microseconds kNotReadyPause{640};

// The attributes that a state needs (InfiniBand architecture, table 92), and the state before it.
struct Transition {
  int from;
  int to;
  int mask;
  ibv::QpAttr Qp::* attr;
};

constexpr std::array kTransitions = {
    Transition{ibv::kQpStateReset, ibv::kQpStateInit,
               ibv::kQpPkeyIndex | ibv::kQpPort | ibv::kQpAccessFlags, &Qp::init},
    Transition{ibv::kQpStateInit, ibv::kQpStateRtr,
               ibv::kQpAv | ibv::kQpPathMtu | ibv::kQpDestQpn | ibv::kQpRqPsn |
                   ibv::kQpMaxDestRdAtomic | ibv::kQpMinRnrTimer,
               &Qp::rtr},
    Transition{ibv::kQpStateRtr, ibv::kQpStateRts,
               ibv::kQpTimeout | ibv::kQpRetryCount | ibv::kQpRnrRetry | ibv::kQpSqPsn |
                   ibv::kQpMaxRdAtomic,
               &Qp::rts},
};

const Device& DeviceOf(const Qp& qp) { return *static_cast<const Device*>(qp.context->device); }

bool AreValuesGood(const Qp& qp, const ibv::QpAttr& attr) {
  const ibv::AhAttr& address = attr.ah_attr;
  if (attr.qp_state == ibv::kQpStateInit) return attr.port_num == 1 && attr.pkey_index == 0;
  if (attr.qp_state == ibv::kQpStateRts) {
    return attr.timeout < 32 && attr.retry_cnt < 8 && attr.rnr_retry < 8;
  }
  return attr.path_mtu >= ibv::kMtu256 && attr.path_mtu <= ibv::kMtu4096 &&
         address.port_num == qp.init.port_num && address.is_global != 0 &&
         DeviceOf(qp).FindGid(address.grh.sgid_index) != nullptr &&
         address.grh.dgid != ibv::Gid{} && attr.min_rnr_timer < 32;
}

// The GID that requests of `qp` leave from; nullptr if it is gone, or the port is down.
const GidRow* SourceOf(const Qp& qp) {
  const Device& device = DeviceOf(qp);
  return device.is_up ? device.FindGid(qp.rtr.ah_attr.grh.sgid_index) : nullptr;
}

// How long a sender waits for an answer, with all its retries.
Time Deadline(const ibv::QpAttr& attr, Time now) {
  if (attr.timeout == 0) return Time::max();
  const auto once = std::chrono::nanoseconds(int64_t{4096} << attr.timeout);
  return now + once * (attr.retry_cnt + 1);
}

bool Accepts(const Qp& qp, const MessageInfo& request) {
  if (qp.now != ibv::kQpStateRtr && qp.now != ibv::kQpStateRts) return false;
  const Device& device = DeviceOf(qp);
  const bool arrives = std::ranges::any_of(device.gids, [&](const GidRow& row) {
    return row.is_there && row.type == request.gid_type && row.gid == request.to;
  });
  return device.is_up && arrives && qp.rtr.dest_qp_num == request.from_qpn &&
         qp.rtr.rq_psn == request.psn && qp.rtr.path_mtu == request.mtu &&
         qp.rtr.ah_attr.grh.dgid == request.from;
}

}  // namespace

Qp* Nic::CreateQp(Pd& pd, const ibv::QpInitAttr& init) {
  const ibv::QpCap& cap = init.cap;
  const bool fits = cap.max_send_wr <= kMaxWr && cap.max_recv_wr <= kMaxWr &&
                    cap.max_send_sge == 1 && cap.max_recv_sge <= 1 && cap.max_inline_data == 0;
  if (!fits || init.qp_type != ibv::kQpTypeRc || init.send_cq == nullptr ||
      init.recv_cq != init.send_cq || qps_.size() + 1 >= kQpsOfProcess) {
    errno = EINVAL;
    return nullptr;
  }
  do {
    last_qpn_ = (last_qpn_ + 1) % kQpsOfProcess;
  } while (last_qpn_ == 0 || qps_.contains(wire_.process() * kQpsOfProcess + last_qpn_));
  auto* const qp = new Qp({&pd, static_cast<Cq*>(init.send_cq)});
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
  qp->cap = cap;
  return qps_[qp->qp_num] = qp;
}

void Nic::DestroyQp(Qp& qp) {
  qps_.erase(qp.qp_num);
  delete &qp;
}

int Nic::ModifyQp(Qp& qp, const ibv::QpAttr& attr, int mask) {
  const int next = attr.qp_state;
  if (next == ibv::kQpStateError && mask == ibv::kQpState) {
    Break(qp);
    qp.state = next;
    return 0;
  }
  for (const Transition& t : kTransitions) {
    if (t.from != qp.now || t.to != next || mask != (t.mask | ibv::kQpState)) continue;
    if (!AreValuesGood(qp, attr)) return EINVAL;
    qp.*t.attr = attr;
    qp.now = qp.state = next;
    return 0;
  }
  return EINVAL;
}

int Nic::PostSend(Qp& qp, const ibv::SendWr& request) {
  const bool is_known = request.opcode == ibv::kWrRdmaWrite ||
                        request.opcode == ibv::kWrRdmaWriteWithImm ||
                        request.opcode == ibv::kWrRdmaRead;
  if (qp.now < ibv::kQpStateRts || request.num_sge < 0 || request.num_sge > 1 || !is_known) {
    return EINVAL;
  }
  if (qp.send_queue.IsFull(qp.cap.max_send_wr)) return ENOMEM;
  Work work;
  work.wr = request;
  work.index = qp.send_queue.posted++;
  if (request.num_sge == 1) work.sge = *request.sg_list;
  qp.sends.push_back(work);
  if (qp.now == ibv::kQpStateError) CompleteSend(qp, ibv::kWcWrFlushErr);
  Wake();
  return 0;
}

int Nic::PostReceive(Qp& qp, const ibv::RecvWr& request) {
  if (qp.now == ibv::kQpStateReset || request.num_sge != 0) return EINVAL;
  if (qp.receive_queue.IsFull(qp.cap.max_recv_wr)) return ENOMEM;
  qp.receives.emplace_back(request.wr_id, qp.receive_queue.posted++);
  if (qp.now == ibv::kQpStateError) CompleteReceive(qp, {.status = ibv::kWcWrFlushErr});
  return 0;
}

void Nic::Complete(Qp& qp, ibv::Wc wc, const Queue& queue, uint64_t index) {
  wc.qp_num = qp.qp_num;
  static_cast<Cq*>(qp.send_cq)->Add({.wc = wc, .retired = queue.retired, .retires = index + 1});
}

void Nic::CompleteSend(Qp& qp, int status) {
  const Work work = qp.sends.front();
  qp.sends.pop_front();
  if (status == ibv::kWcSuccess && (work.wr.send_flags & ibv::kSendSignaled) == 0) return;
  const bool is_read = work.wr.opcode == ibv::kWrRdmaRead;
  Complete(qp,
           {.wr_id = work.wr.wr_id,
            .status = status,
            .opcode = is_read ? ibv::kWcRdmaRead : ibv::kWcRdmaWrite,
            .byte_len = is_read ? work.sge.length : 0},
           qp.send_queue, work.index);
}

void Nic::CompleteReceive(Qp& qp, ibv::Wc wc) {
  const auto [wr_id, index] = qp.receives.front();
  qp.receives.pop_front();
  wc.wr_id = wr_id;
  wc.opcode = ibv::kWcRecvRdmaWithImm;
  Complete(qp, wc, qp.receive_queue, index);
}

void Nic::Break(Qp& qp) {
  qp.now = ibv::kQpStateError;
  qp.is_waiting = false;
  while (!qp.sends.empty()) CompleteSend(qp, ibv::kWcWrFlushErr);
  while (!qp.receives.empty()) CompleteReceive(qp, {.status = ibv::kWcWrFlushErr});
}

void Nic::Fail(Qp& qp, int status) {
  CompleteSend(qp, status);
  Break(qp);
}

bool Nic::Step(Qp& qp, Time now) {
  if (qp.now != ibv::kQpStateRts || qp.sends.empty() || now < qp.wake_at) return false;
  Work& work = qp.sends.front();
  if (qp.is_waiting) {
    Fail(qp, ibv::kWcRetryExcErr);
  } else if (!work.has_begun && !Begin(qp, work, now)) {
    return true;
  } else if (work.error && work.error->num_bytes == 0) {
    Fail(qp, work.error->number);
  } else if (!HasMemory(qp, work)) {
    Fail(qp, ibv::kWcLocProtErr);
  } else if (SourceOf(qp) == nullptr || !wire_.Send(MakeRequest(qp, work))) {
    OnDropped(qp);
  } else {
    qp.is_waiting = true;
    qp.wake_at = Deadline(qp.rts, now);
  }
  return true;
}

// False if a fault, or a pause, comes first.
bool Nic::Begin(Qp& qp, Work& work, Time now) {
  work.has_begun = true;
  ++num_requests_;
  qp.retries_left = qp.rts.retry_cnt;
  if (jitter_.count() > 0) qp.wake_at = now + jitter_ * (random_() % 1000) / 1000;
  const Fault* const fault = Take(FaultKind::kError, FaultKind::kPeerFlush);
  if (fault == nullptr) return now >= qp.wake_at;
  switch (fault->kind) {
    case FaultKind::kError:
      work.error = *fault;
      break;
    case FaultKind::kGhost:
      for (const Work& each : qp.sends) {
        if (SourceOf(qp) == nullptr || !HasMemory(qp, each)) break;
        late_.emplace(now + fault->delay, MakeRequest(qp, each));
      }
      Fail(qp, ibv::kWcRetryExcErr);
      return false;
    case FaultKind::kFlush:
      Break(qp);
      return false;
    case FaultKind::kPeerFlush:
      work.breaks_peer = true;
      break;
    default:
      qp.wake_at = now + fault->delay;
  }
  return now >= qp.wake_at;
}

bool Nic::HasMemory(const Qp& qp, const Work& work) const {
  const ibv::Sge& sge = work.sge;
  const int access = work.wr.opcode == ibv::kWrRdmaRead ? ibv::kAccessLocalWrite : 0;
  return sge.length == 0 || memory_.Find(qp.pd, sge.lkey, sge.addr, sge.length, access) != nullptr;
}

// The message of a request. A request that is to fail sends its first `num_bytes` only.
Message Nic::MakeRequest(const Qp& qp, const Work& work) const {
  const GidRow& source = *SourceOf(qp);
  const uint64_t whole = work.sge.length;
  const uint64_t length = work.error ? std::min(whole, work.error->num_bytes) : whole;
  Message message;
  message.info = {.to_qpn = qp.rtr.dest_qp_num,
                  .from_qpn = qp.qp_num,
                  .psn = qp.rts.sq_psn,
                  .from = source.gid,
                  .to = qp.rtr.ah_attr.grh.dgid,
                  .gid_type = source.type,
                  .opcode = work.wr.opcode,
                  .mtu = qp.rtr.path_mtu,
                  .is_whole = length == whole ? 1U : 0U,
                  .breaks_qp = work.breaks_peer ? 1U : 0U,
                  .imm_data = work.wr.imm_data,
                  .rkey = work.wr.rkey,
                  .length = static_cast<uint32_t>(length),
                  .remote_addr = work.wr.remote_addr};
  if (length > 0 && work.wr.opcode != ibv::kWrRdmaRead) {
    const Mr* const mr = memory_.Find(qp.pd, work.sge.lkey, work.sge.addr, length, 0);
    message.bytes = memory_.Read(*mr, work.sge.addr, length);
  }
  return message;
}

void Nic::OnResponse(const Message& response) {
  Qp* const qp = Find(response.info.to_qpn);
  if (qp == nullptr || !qp->is_waiting) return;
  qp->is_waiting = false;
  qp->wake_at = {};
  const Work& work = qp->sends.front();
  const int status = response.info.status;
  if (status == kDropped) return OnDropped(*qp);
  if (status == kNotReadyYet) {
    qp->wake_at = Clock::now() + kNotReadyPause;
    return;
  }
  if (status != ibv::kWcSuccess) return Fail(*qp, status);
  if (work.wr.opcode == ibv::kWrRdmaRead) {
    if (!HasMemory(*qp, work)) return Fail(*qp, ibv::kWcLocProtErr);
    Write(*memory_.Find(qp->pd, work.sge.lkey, work.sge.addr, response.bytes.size(), 0),
          work.sge.addr, response.bytes);
  }
  if (work.error) return Fail(*qp, work.error->number);
  CompleteSend(*qp, ibv::kWcSuccess);
}

// The other end may not be ready yet, or gone: the sender can't tell which.
void Nic::OnDropped(Qp& qp) {
  if (qp.retries_left-- == 0) return Fail(qp, ibv::kWcRetryExcErr);
  qp.wake_at = Clock::now() + retry_interval_;
}

Message Nic::Respond(const Message& request) {
  Message response;
  response.info.is_response = 1;
  response.info.to_qpn = request.info.from_qpn;
  response.info.from_qpn = request.info.to_qpn;
  response.info.status = kDropped;
  Qp* const qp = Find(request.info.to_qpn);
  if (qp == nullptr || !Accepts(*qp, request.info)) return response;
  if (request.info.breaks_qp != 0) {
    Break(*qp);
  } else {
    response.info.status = Execute(*qp, request, response);
  }
  return response;
}

// A request that may not be executed breaks both ends.
int Nic::Execute(Qp& qp, const Message& request, Message& response) {
  const MessageInfo& info = request.info;
  const bool has_imm = info.opcode == ibv::kWrRdmaWriteWithImm && info.is_whole != 0;
  if (has_imm && qp.receives.empty()) return kNotReadyYet;
  const bool is_read = info.opcode == ibv::kWrRdmaRead;
  if (info.length > 0) {
    const int access = is_read ? ibv::kAccessRemoteRead : ibv::kAccessRemoteWrite;
    const bool is_allowed = (static_cast<int>(qp.init.qp_access_flags) & access) != 0;
    const Mr* const mr = memory_.Find(qp.pd, info.rkey, info.remote_addr, info.length, access);
    if (!is_allowed || mr == nullptr) {
      Break(qp);
      return ibv::kWcRemAccessErr;
    }
    if (is_read) {
      response.bytes = memory_.Read(*mr, info.remote_addr, info.length);
    } else {
      Write(*mr, info.remote_addr, request.bytes);
    }
  }
  if (has_imm) {
    CompleteReceive(
        qp, {.byte_len = info.length, .imm_data = info.imm_data, .wc_flags = ibv::kWcWithImm});
  }
  return ibv::kWcSuccess;
}

void Nic::Write(const Mr& mr, uint64_t address, std::vector<std::byte> bytes) {
  if (bytes.empty()) return;
  const Fault* const fault = Take(FaultKind::kLose, FaultKind::kGarble, {}, mr.is_dmabuf);
  if (fault != nullptr && fault->kind == FaultKind::kLose) return;
  if (fault != nullptr) bytes[bytes.size() / 2] ^= std::byte{0x10};
  memory_.Write(mr, address, bytes);
}

}  // namespace jaxhet::softverbs
