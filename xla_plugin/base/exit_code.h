#ifndef XLA_PLUGIN_BASE_EXIT_CODE_H_
#define XLA_PLUGIN_BASE_EXIT_CODE_H_

namespace jaxhet {

// Has exit(0), or a return from main, end this process with `code`. Other codes stay, and children
// forked later are not concerned. Call it once, as late as possible: exit handlers that were
// registered before, and static destructors, do not run then. Throws DeviceError.
void FailExit(int code);

}  // namespace jaxhet

#endif  // XLA_PLUGIN_BASE_EXIT_CODE_H_
