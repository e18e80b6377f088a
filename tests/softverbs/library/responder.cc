#include <utility>

#include "tests/softverbs/library/nic.h"

namespace jaxhet::softverbs {

Packet Nic::Respond(const Packet& request) {
  Packet response;
  response.info.kind = PacketKind::kResponse;
  response.info.to_qpn = request.info.from_qpn;
  response.info.from_qpn = request.info.to_qpn;
  response.info.psn = request.info.psn;
  response.info.status = kDropped;
  Qp* const qp = Find(request.info.to_qpn);
  if (qp == nullptr || !Accepts(*qp, request.info)) return response;
  if (request.info.breaks_qp != 0) {
    Break(*qp);
    return response;
  }
  response.info.status = Execute(*qp, request, response);
  response.info.rnr_timer = qp->attr.min_rnr_timer;
  if (response.info.status == ibv::kWcSuccess) ++qp->receive_psn;
  return response;
}

bool Nic::Accepts(const Qp& qp, const PacketInfo& request) {
  if (qp.now != ibv::kQpStateRtr && qp.now != ibv::kQpStateRts) return false;
  const auto* const model = static_cast<Context*>(qp.context)->model;
  const ibv::AhAttr& peer = qp.attr.ah_attr;
  return Fabric::Arrives(*model->FindPort(qp.attr.port_num), request.route) &&
         qp.attr.dest_qp_num == request.from_qpn && qp.receive_psn == request.psn &&
         qp.attr.path_mtu == request.mtu &&
         (request.route.is_global == 0 || peer.grh.dgid.raw == request.route.from.raw);
}

int Nic::Execute(Qp& qp, const Packet& request, Packet& response) {
  switch (request.info.opcode) {
    case ibv::kWrRdmaWrite:
    case ibv::kWrRdmaWriteWithImm:
      return ExecuteWrite(qp, request);
    case ibv::kWrRdmaRead:
      return ExecuteRead(qp, request, response);
    default:
      return ExecuteSend(qp, request);
  }
}

// A request that may not be executed breaks both ends.
const Mr* Nic::FindRemote(Qp& qp, const PacketInfo& request, int access) {
  const bool is_allowed = (static_cast<int>(qp.attr.qp_access_flags) & access) != 0;
  const Mr* const mr = is_allowed ? memory_.Find(qp.pd, request.rkey, request.remote_addr,
                                                 request.total_length, access)
                                  : nullptr;
  if (mr == nullptr) Break(qp);
  return mr;
}

int Nic::ExecuteWrite(Qp& qp, const Packet& request) {
  const PacketInfo& info = request.info;
  const bool has_imm = info.opcode == ibv::kWrRdmaWriteWithImm && info.is_last != 0;
  if (has_imm && qp.receives.empty()) return kNotReadyYet;
  if (info.total_length > 0) {
    const Mr* const mr = FindRemote(qp, info, ibv::kAccessRemoteWrite);
    if (mr == nullptr) return ibv::kWcRemAccessErr;
    memory_.Write(*mr, info.remote_addr + info.offset, request.bytes);
  }
  if (has_imm) {
    CompleteReceive(qp,
                    {.opcode = ibv::kWcRecvRdmaWithImm,
                     .byte_len = static_cast<uint32_t>(info.total_length),
                     .imm_data = info.imm_data,
                     .wc_flags = ibv::kWcWithImm},
                    info.is_solicited != 0);
  }
  return ibv::kWcSuccess;
}

int Nic::ExecuteSend(Qp& qp, const Packet& request) {
  const PacketInfo& info = request.info;
  if (qp.receives.empty()) return kNotReadyYet;
  const std::vector<ibv::Sge>& sges = qp.receives.front().sges;
  uint64_t room = 0;
  for (const ibv::Sge& sge : sges) room += sge.length;
  const auto refuse = [&](int own_status, int status) {
    CompleteReceive(qp, {.status = own_status, .opcode = ibv::kWcRecv}, false);
    Break(qp);
    return status;
  };
  if (info.total_length > room) return refuse(ibv::kWcLocLenErr, ibv::kWcRemInvReqErr);
  if (!memory_.Check(qp.pd, sges, ibv::kAccessLocalWrite)) {
    return refuse(ibv::kWcLocProtErr, ibv::kWcRemOpErr);
  }
  memory_.Scatter(sges, info.offset, request.bytes);
  if (info.is_last == 0) return ibv::kWcSuccess;
  const bool has_imm = info.opcode == ibv::kWrSendWithImm;
  CompleteReceive(qp,
                  {.opcode = ibv::kWcRecv,
                   .byte_len = static_cast<uint32_t>(info.total_length),
                   .imm_data = has_imm ? info.imm_data : 0,
                   .wc_flags = has_imm ? ibv::kWcWithImm : 0},
                  info.is_solicited != 0);
  return ibv::kWcSuccess;
}

int Nic::ExecuteRead(Qp& qp, const Packet& request, Packet& response) {
  const PacketInfo& info = request.info;
  if (info.total_length == 0) return ibv::kWcSuccess;
  const Mr* const mr = FindRemote(qp, info, ibv::kAccessRemoteRead);
  if (mr == nullptr) return ibv::kWcRemAccessErr;
  response.bytes.resize(info.length);
  memory_.Read(*mr, info.remote_addr + info.offset, response.bytes);
  return ibv::kWcSuccess;
}

}  // namespace jaxhet::softverbs
