#ifndef TESTS_SOFTVERBS_LIBRARY_QP_STATE_H_
#define TESTS_SOFTVERBS_LIBRARY_QP_STATE_H_

#include "tests/softverbs/library/objects.h"

namespace jaxhet::softverbs {

// Result of ibv_modify_qp for a QP in state `now`: 0 or an errno. Checks the attributes that
// each transition needs and allows (InfiniBand architecture, table 92), and their values.
int CheckModify(int now, const ibv::QpAttr& attr, int mask, const DeviceModel& device,
                int own_port);

// Takes over the attributes that `mask` names.
void ApplyModify(Qp& qp, const ibv::QpAttr& attr, int mask);

}  // namespace jaxhet::softverbs

#endif  // TESTS_SOFTVERBS_LIBRARY_QP_STATE_H_
