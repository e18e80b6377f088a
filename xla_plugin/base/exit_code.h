#ifndef XLA_PLUGIN_BASE_EXIT_CODE_H_
#define XLA_PLUGIN_BASE_EXIT_CODE_H_

#include <chrono>
#include <functional>
#include <string>

namespace jaxhet {

// Has exit(0), or a return from main, end this process with `code`. Other codes stay, and children
// forked later are not concerned. Throws DeviceError.
void FailExit(int code);

// Ends this process with `code`, and `text` on stderr, if it still runs `limit` after `has_begun`
// first returns true. Calls `has_begun` every 50 ms, on a thread of its own. Throws DeviceError.
void LimitExit(std::function<bool()> has_begun, std::chrono::milliseconds limit, std::string text,
               int code);

}  // namespace jaxhet

#endif  // XLA_PLUGIN_BASE_EXIT_CODE_H_
