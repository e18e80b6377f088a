#ifndef TESTS_SOFTVERBS_LIBRARY_VERBS_VALUES_H_
#define TESTS_SOFTVERBS_LIBRARY_VERBS_VALUES_H_

#include <cstdint>

#include "xla_plugin/net/verbs/verbs_abi.h"

// Values of libibverbs that the product does not use, and a NIC in software does.
namespace jaxhet::ibv {

inline constexpr int kGidTypeRoceV1 = 1;        // IBV_GID_TYPE_ROCE_V1
inline constexpr int kGidTypeRoceV2 = 2;        // IBV_GID_TYPE_ROCE_V2
inline constexpr int kPortDown = 1;             // IBV_PORT_DOWN
inline constexpr int kMtu256 = 1;               // IBV_MTU_256
inline constexpr int kMtu4096 = 5;              // IBV_MTU_4096
inline constexpr int kQpStateReset = 0;         // IBV_QPS_RESET
inline constexpr int kWcLocProtErr = 4;         // IBV_WC_LOC_PROT_ERR
inline constexpr int kWcWrFlushErr = 5;         // IBV_WC_WR_FLUSH_ERR
inline constexpr int kWcRemAccessErr = 10;      // IBV_WC_REM_ACCESS_ERR
inline constexpr int kWcRetryExcErr = 12;       // IBV_WC_RETRY_EXC_ERR
inline constexpr int kWcRnrRetryExcErr = 13;    // IBV_WC_RNR_RETRY_EXC_ERR
inline constexpr int kWcRdmaWrite = 1;          // IBV_WC_RDMA_WRITE
inline constexpr int kWcRdmaRead = 2;           // IBV_WC_RDMA_READ
inline constexpr int kWcRecvRdmaWithImm = 129;  // IBV_WC_RECV_RDMA_WITH_IMM
inline constexpr unsigned kWcWithImm = 1 << 1;  // IBV_WC_WITH_IMM

}  // namespace jaxhet::ibv

#endif  // TESTS_SOFTVERBS_LIBRARY_VERBS_VALUES_H_
