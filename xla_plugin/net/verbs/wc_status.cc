#include "xla_plugin/net/verbs/wc_status.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "xla_plugin/base/strings.h"

namespace jaxhet::verbs {
namespace {

struct Status {
  int status;
  bool is_fatal;
  std::string_view name;
};

constexpr std::array<Status, 15> kStatuses = {{
    {ibv::kWcLocLenErr, true, "LOC_LEN_ERR"},
    {ibv::kWcLocQpOpErr, true, "LOC_QP_OP_ERR"},
    {ibv::kWcLocProtErr, true, "LOC_PROT_ERR"},
    {ibv::kWcWrFlushErr, false, "WR_FLUSH_ERR"},
    {ibv::kWcBadRespErr, false, "BAD_RESP_ERR"},
    {ibv::kWcLocAccessErr, true, "LOC_ACCESS_ERR"},
    {ibv::kWcRemInvReqErr, true, "REM_INV_REQ_ERR"},
    {ibv::kWcRemAccessErr, true, "REM_ACCESS_ERR"},
    {ibv::kWcRemOpErr, false, "REM_OP_ERR"},
    {ibv::kWcRetryExcErr, false, "RETRY_EXC_ERR"},
    {ibv::kWcRnrRetryExcErr, false, "RNR_RETRY_EXC_ERR"},
    {ibv::kWcRemAbortErr, false, "REM_ABORT_ERR"},
    {ibv::kWcFatalErr, false, "FATAL_ERR"},
    {ibv::kWcRespTimeoutErr, false, "RESP_TIMEOUT_ERR"},
    {ibv::kWcGeneralErr, false, "GENERAL_ERR"},
}};

}  // namespace

bool IsFatal(int status) {
  const auto* const found = std::ranges::find(kStatuses, status, &Status::status);
  return found != kStatuses.end() && found->is_fatal;
}

std::string Describe(const ibv::Wc& wc) {
  const auto* const found = std::ranges::find(kStatuses, wc.status, &Status::status);
  return StrCat("IBV_WC_", found == kStatuses.end() ? "?" : found->name, " (", wc.status,
                ", vendor error ", wc.vendor_err, ")");
}

}  // namespace jaxhet::verbs
