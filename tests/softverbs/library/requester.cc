#include <algorithm>
#include <utility>

#include "tests/softverbs/library/nic.h"

namespace jaxhet::softverbs {
namespace {

constexpr int kWithoutEnd = 7;  // a value of rnr_retry

// End of a request: its length, or the place of its fault.
uint64_t EndOf(const Work& work) {
  return work.fails_with ? std::min(work.length, work.fail_at) : work.length;
}

uint64_t BytesAt(const Work& work, uint64_t offset) {
  return std::min(kPacketBytes, EndOf(work) - offset);
}

// How long a requester waits for an answer, with all its retries.
Time Deadline(const ibv::QpAttr& attr, Time now) {
  if (attr.timeout == 0) return Time::max();
  const auto once = std::chrono::nanoseconds(int64_t{4096} << attr.timeout);
  return now + once * (attr.retry_cnt + 1);
}

// The waiting times that the InfiniBand architecture gives the 32 values of the timer, from 1 on.
std::chrono::microseconds RnrPause(uint32_t timer) {
  static constexpr std::array<int, 32> kMicroseconds = {
      655360, 10,    20,    30,    40,    60,     80,     120,    160,    240,   320,
      480,    640,   960,   1280,  1920,  2560,   3840,   5120,   7680,   10240, 15360,
      20480,  30720, 40960, 61440, 81920, 122880, 163840, 245760, 327680, 491520};
  return std::chrono::microseconds(kMicroseconds.at(timer));
}

}  // namespace

bool Nic::Step(Qp& qp, Time now) {
  if (qp.now != ibv::kQpStateRts || qp.sends.empty() || now < qp.wake_at) return false;
  if (qp.is_waiting) {
    Fail(qp, ibv::kWcRetryExcErr);
    return true;
  }
  Work& work = qp.sends.front();
  if (!work.has_begun && !Begin(qp, work, now)) return true;
  if (work.fails_with && qp.offset >= work.fail_at) {
    Fail(qp, *work.fails_with);
    return true;
  }
  SendRequest(qp, work, now);
  return true;
}

// False if a fault, or a pause, comes first.
bool Nic::Begin(Qp& qp, Work& work, Time now) {
  work.has_begun = true;
  ++num_requests_;
  qp.retries_left = qp.attr.retry_cnt;
  qp.rnr_retries_left = qp.attr.rnr_retry;
  if (jitter_.count() > 0) {
    qp.wake_at = now + jitter_ * (random_() % 1000) / 1000;
  }
  Site site;
  site.device = qp.context->device->name.data();
  site.port = qp.attr.port_num;
  site.qpn = qp.qp_num;
  site.opcode = work.opcode;
  const Fault* const fault = faults_.Take(FaultKind::kError, FaultKind::kPeerFlush, site);
  if (fault == nullptr) return now >= qp.wake_at;
  switch (fault->kind) {
    case FaultKind::kError:
      work.fails_with = fault->status;
      work.fail_at = fault->bytes;
      break;
    case FaultKind::kGhost:
      Haunt(qp, now + fault->delay);
      Fail(qp, ibv::kWcRetryExcErr);
      return false;
    case FaultKind::kFlush:
      Break(qp);
      return false;
    case FaultKind::kPeerFlush:
      work.breaks_peer = true;
      break;
    default:
      break;
  }
  if (fault->delay.count() > 0) qp.wake_at = now + fault->delay;
  return now >= qp.wake_at;
}

Packet Nic::MakeRequest(const Qp& qp, const Work& work, uint64_t offset, uint32_t psn) const {
  const uint64_t num_bytes = BytesAt(work, offset);
  Packet packet;
  PacketInfo& info = packet.info;
  info.kind = PacketKind::kRequest;
  info.to_qpn = qp.attr.dest_qp_num;
  info.from_qpn = qp.qp_num;
  info.psn = psn;
  info.opcode = work.opcode;
  info.mtu = qp.attr.path_mtu;
  info.is_last = offset + num_bytes == work.length ? 1 : 0;
  info.is_solicited = work.flags & ibv::kSendSolicited;
  info.breaks_qp = work.breaks_peer ? 1 : 0;
  info.imm_data = work.imm_data;
  info.rkey = work.rkey;
  info.length = static_cast<uint32_t>(num_bytes);
  info.remote_addr = work.remote_addr;
  info.total_length = work.length;
  info.offset = offset;
  if (work.opcode == ibv::kWrRdmaRead) return packet;
  packet.bytes.resize(num_bytes);
  if ((work.flags & ibv::kSendInline) != 0) {
    std::copy_n(work.inline_bytes.begin() + static_cast<ptrdiff_t>(offset), num_bytes,
                packet.bytes.begin());
  } else {
    memory_.Gather(work.sges, offset, packet.bytes);
  }
  return packet;
}

void Nic::SendRequest(Qp& qp, const Work& work, Time now) {
  const auto* const model = static_cast<Context*>(qp.context)->model;
  const int access = work.opcode == ibv::kWrRdmaRead ? ibv::kAccessLocalWrite : 0;
  const bool is_inline = (work.flags & ibv::kSendInline) != 0;
  if (!is_inline && !memory_.Check(qp.pd, work.sges, access)) {
    return Fail(qp, ibv::kWcLocProtErr);
  }
  Packet packet = MakeRequest(qp, work, qp.offset, qp.send_psn);
  const PortModel& port = *model->FindPort(qp.attr.port_num);
  if (!Fabric::Leave(port, qp.attr.ah_attr, packet.info.route) || !Send(std::move(packet))) {
    return OnDropped(qp);
  }
  qp.is_waiting = true;
  qp.wake_at = Deadline(qp.attr, now);
}

void Nic::Haunt(const Qp& qp, Time when) {
  const PortModel& port = *static_cast<Context*>(qp.context)->model->FindPort(qp.attr.port_num);
  uint32_t psn = qp.send_psn;
  for (const Work& work : qp.sends) {
    const bool is_inline = (work.flags & ibv::kSendInline) != 0;
    if (!is_inline && !memory_.Check(qp.pd, work.sges, 0)) return;
    uint64_t offset = 0;
    do {
      Packet packet = MakeRequest(qp, work, offset, psn++);
      if (!Fabric::Leave(port, qp.attr.ah_attr, packet.info.route)) return;
      offset += packet.info.length;
      late_.emplace(when, std::move(packet));
    } while (offset < work.length);
  }
}

void Nic::Fail(Qp& qp, int status) {
  CompleteSend(qp, status);
  Break(qp);
}

void Nic::OnResponse(const Packet& packet) {
  Qp* const qp = Find(packet.info.to_qpn);
  if (qp == nullptr || !qp->is_waiting || packet.info.psn != qp->send_psn) return;
  qp->is_waiting = false;
  qp->wake_at = {};
  switch (packet.info.status) {
    case ibv::kWcSuccess:
      return OnAck(*qp, packet);
    case kDropped:
      return OnDropped(*qp);
    case kNotReadyYet:
      return OnNotReady(*qp, packet.info.rnr_timer);
    default:
      return Fail(*qp, packet.info.status);
  }
}

void Nic::OnAck(Qp& qp, const Packet& packet) {
  const Work& work = qp.sends.front();
  const uint64_t num_bytes = BytesAt(work, qp.offset);
  if (work.opcode == ibv::kWrRdmaRead) {
    if (!memory_.Check(qp.pd, work.sges, ibv::kAccessLocalWrite)) {
      return Fail(qp, ibv::kWcLocProtErr);
    }
    memory_.Scatter(work.sges, qp.offset, packet.bytes);
  }
  qp.offset += num_bytes;
  ++qp.send_psn;
  qp.retries_left = qp.attr.retry_cnt;
  qp.rnr_retries_left = qp.attr.rnr_retry;
  if (qp.offset < work.length) return;
  if (work.fails_with) return Fail(qp, *work.fails_with);
  CompleteSend(qp, ibv::kWcSuccess);
}

// The other end may not be ready yet, or gone: the requester can't tell which.
void Nic::OnDropped(Qp& qp) {
  if (qp.retries_left == 0) return Fail(qp, ibv::kWcRetryExcErr);
  --qp.retries_left;
  qp.wake_at = Clock::now() + retry_interval_;
}

void Nic::OnNotReady(Qp& qp, uint32_t rnr_timer) {
  if (qp.rnr_retries_left == 0) return Fail(qp, ibv::kWcRnrRetryExcErr);
  if (qp.rnr_retries_left != kWithoutEnd) --qp.rnr_retries_left;
  qp.wake_at = Clock::now() + RnrPause(rnr_timer);
}

}  // namespace jaxhet::softverbs
