#include "tests/softverbs/library/faults.h"

namespace jaxhet::softverbs {
namespace {

bool Matches(const Fault& fault, const Site& site) {
  return (fault.device.empty() || fault.device == site.device) &&
         fault.port.value_or(site.port) == site.port && fault.qpn.value_or(site.qpn) == site.qpn &&
         fault.opcode.value_or(site.opcode) == site.opcode &&
         (!fault.only_dmabuf || site.is_dmabuf) && fault.call == site.call;
}

}  // namespace

const Fault* Faults::Take(FaultKind first, FaultKind last, const Site& site) {
  const Fault* due = nullptr;
  for (Fault& fault : faults_) {
    if (fault.kind < first || fault.kind > last || !Matches(fault, site)) continue;
    const uint64_t match = fault.matches++;
    if (due == nullptr && match >= fault.after && match - fault.after < fault.count) due = &fault;
  }
  if (due != nullptr) ++num_fired_;
  return due;
}

}  // namespace jaxhet::softverbs
