#include "xla_plugin/base/exit_code.h"

#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "xla_plugin/base/error.h"
#include "xla_plugin/base/thread.h"

namespace jaxhet {
namespace {

constexpr std::chrono::milliseconds kLook{50};

struct Ending {
  pid_t process;
  int code;
};

void End(int status, void* argument) {  // NOLINT(misc-const-correctness): on_exit's type
  const std::unique_ptr<const Ending> ending(static_cast<const Ending*>(argument));
  if (status != 0 || getpid() != ending->process) return;
  std::exit(ending->code);  // glibc goes on with the handlers that are left
}

}  // namespace

void FailExit(int code) {
  auto* const ending = new Ending{.process = getpid(), .code = code};  // End() deletes it
  if (on_exit(&End, ending) == 0) return;
  delete ending;
  Throw(ErrorCode::kDevice, "on_exit: no memory for another exit handler");
}

void LimitExit(std::function<bool()> has_begun, std::chrono::milliseconds limit, std::string text,
               int code) {
  StartThread("jaxhet-exit", [has_begun = std::move(has_begun), limit, text = std::move(text),
                              code] {
    while (!has_begun()) std::this_thread::sleep_for(kLook);
    std::this_thread::sleep_for(limit);
    LogLine(text);
    _exit(code);
  }).detach();
}

}  // namespace jaxhet
