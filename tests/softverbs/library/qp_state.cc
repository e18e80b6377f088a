#include "tests/softverbs/library/qp_state.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

namespace jaxhet::softverbs {
namespace {

constexpr int kAlternatePath = 1 << 14;  // IBV_QP_ALT_PATH
constexpr int kMigration = 1 << 18;      // IBV_QP_PATH_MIG_STATE
constexpr int kMaxRdAtomic = 16;

struct Transition {
  int from;
  int to;
  int required;
  int allowed;
};

constexpr int kToInit = ibv::kQpPkeyIndex | ibv::kQpPort | ibv::kQpAccessFlags;
constexpr int kToRtr = ibv::kQpAv | ibv::kQpPathMtu | ibv::kQpDestQpn | ibv::kQpRqPsn |
                       ibv::kQpMaxDestRdAtomic | ibv::kQpMinRnrTimer;
constexpr int kToRts =
    ibv::kQpTimeout | ibv::kQpRetryCount | ibv::kQpRnrRetry | ibv::kQpSqPsn | ibv::kQpMaxRdAtomic;
constexpr int kRtsChanges = ibv::kQpAccessFlags | ibv::kQpMinRnrTimer | kAlternatePath | kMigration;

constexpr std::array kTransitions = {
    Transition{ibv::kQpStateReset, ibv::kQpStateInit, kToInit, 0},
    Transition{ibv::kQpStateInit, ibv::kQpStateInit, 0, kToInit},
    Transition{ibv::kQpStateInit, ibv::kQpStateRtr, kToRtr,
               ibv::kQpPkeyIndex | ibv::kQpAccessFlags | kAlternatePath},
    Transition{ibv::kQpStateRtr, ibv::kQpStateRts, kToRts, kRtsChanges},
    Transition{ibv::kQpStateRts, ibv::kQpStateRts, 0, kRtsChanges},
};

bool IsAllowed(int now, int next, int mask) {
  mask &= ~(ibv::kQpState | ibv::kQpCurState);
  if (next == ibv::kQpStateError || next == ibv::kQpStateReset) return mask == 0;
  for (const Transition& t : kTransitions) {
    if (t.from != now || t.to != next) continue;
    return (mask & t.required) == t.required && (mask & ~(t.required | t.allowed)) == 0;
  }
  return false;
}

bool IsAddressGood(const ibv::AhAttr& address, const DeviceModel& device, int own_port) {
  const PortModel* const port = device.FindPort(address.port_num);
  if (port == nullptr || std::cmp_not_equal(address.port_num, own_port)) return false;
  const bool is_infiniband = port->link_layer == ibv::kLinkLayerInfiniband;
  if (address.is_global == 0) return is_infiniband;
  return port->FindGid(address.grh.sgid_index) != nullptr && address.grh.dgid != ibv::Gid{};
}

struct Value {
  int bit;
  int value;
  int least;
  int most;
};

bool AreValuesGood(const ibv::QpAttr& attr, int mask, const DeviceModel& device, int own_port) {
  if ((mask & ibv::kQpPort) != 0) own_port = attr.port_num;
  const PortModel* const port = device.FindPort(own_port);
  if (port == nullptr) return mask == ibv::kQpState;
  const std::array values = {
      Value{ibv::kQpPkeyIndex, attr.pkey_index, 0, 0},
      Value{ibv::kQpPathMtu, attr.path_mtu, ibv::kMtu256, port->mtu},
      Value{ibv::kQpMaxDestRdAtomic, attr.max_dest_rd_atomic, 0, kMaxRdAtomic},
      Value{ibv::kQpMaxRdAtomic, attr.max_rd_atomic, 0, kMaxRdAtomic},
      Value{ibv::kQpTimeout, attr.timeout, 0, 31},
      Value{ibv::kQpRetryCount, attr.retry_cnt, 0, 7},
      Value{ibv::kQpRnrRetry, attr.rnr_retry, 0, 7},
      Value{ibv::kQpMinRnrTimer, attr.min_rnr_timer, 0, 31},
  };
  if ((mask & ibv::kQpAv) != 0 && !IsAddressGood(attr.ah_attr, device, own_port)) return false;
  return std::ranges::all_of(values, [&](const Value& v) {
    return (mask & v.bit) == 0 || (v.value >= v.least && v.value <= v.most);
  });
}

}  // namespace

int CheckModify(int now, const ibv::QpAttr& attr, int mask, const DeviceModel& device,
                int own_port) {
  const int next = (mask & ibv::kQpState) != 0 ? attr.qp_state : now;
  if ((mask & ibv::kQpCurState) != 0 && attr.cur_qp_state != now) return EINVAL;
  if (!IsAllowed(now, next, mask) || !AreValuesGood(attr, mask, device, own_port)) return EINVAL;
  return 0;
}

void ApplyModify(Qp& qp, const ibv::QpAttr& attr, int mask) {
  ibv::QpAttr& own = qp.attr;
  const auto take = [&](int bit, auto member) {
    if ((mask & bit) != 0) own.*member = attr.*member;
  };
  take(ibv::kQpAccessFlags, &ibv::QpAttr::qp_access_flags);
  take(ibv::kQpPkeyIndex, &ibv::QpAttr::pkey_index);
  take(ibv::kQpPort, &ibv::QpAttr::port_num);
  take(ibv::kQpAv, &ibv::QpAttr::ah_attr);
  take(ibv::kQpPathMtu, &ibv::QpAttr::path_mtu);
  take(ibv::kQpDestQpn, &ibv::QpAttr::dest_qp_num);
  take(ibv::kQpRqPsn, &ibv::QpAttr::rq_psn);
  take(ibv::kQpMaxDestRdAtomic, &ibv::QpAttr::max_dest_rd_atomic);
  take(ibv::kQpMinRnrTimer, &ibv::QpAttr::min_rnr_timer);
  take(ibv::kQpTimeout, &ibv::QpAttr::timeout);
  take(ibv::kQpRetryCount, &ibv::QpAttr::retry_cnt);
  take(ibv::kQpRnrRetry, &ibv::QpAttr::rnr_retry);
  take(ibv::kQpSqPsn, &ibv::QpAttr::sq_psn);
  take(ibv::kQpMaxRdAtomic, &ibv::QpAttr::max_rd_atomic);
  if ((mask & ibv::kQpRqPsn) != 0) qp.receive_psn = attr.rq_psn;
  if ((mask & ibv::kQpSqPsn) != 0) qp.send_psn = attr.sq_psn;
  if ((mask & ibv::kQpState) != 0) qp.now = qp.state = attr.qp_state;
}

}  // namespace jaxhet::softverbs
