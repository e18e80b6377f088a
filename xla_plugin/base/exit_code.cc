#include "xla_plugin/base/exit_code.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>

#include "xla_plugin/base/error.h"

namespace jaxhet {
namespace {

struct Ending {
  pid_t process;
  int code;
};

void End(int status, void* argument) {  // NOLINT(misc-const-correctness): on_exit's type
  const std::unique_ptr<const Ending> ending(static_cast<const Ending*>(argument));
  if (status != 0 || getpid() != ending->process) return;
  std::fflush(nullptr);
  _exit(ending->code);
}

}  // namespace

void FailExit(int code) {
  auto* const ending = new Ending{.process = getpid(), .code = code};  // End() deletes it
  if (on_exit(&End, ending) == 0) return;
  delete ending;
  Throw(ErrorCode::kDevice, "on_exit: no memory for another exit handler");
}

}  // namespace jaxhet
