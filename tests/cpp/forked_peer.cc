#include "tests/cpp/forked_peer.h"

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <utility>
#include <vector>

namespace jaxhet::testing {
namespace {

int RunScript(const WorldOptions& options, std::vector<Ends> ends,
              const ForkedPeer::Script& script) {
  try {
    const auto engine = MakeEngine(1, options, std::move(ends));
    SetUp(*engine, options);
    return script(*engine);
  } catch (const std::exception&) {
    return 99;
  }
}

}  // namespace

ForkedPeer::ForkedPeer(const WorldOptions& options, const Script& script) {
  auto ends = ConnectAll(2);
  pid_ = fork();
  if (pid_ == 0) {
    ends[0].clear();
    _exit(RunScript(options, std::move(ends[1]), script));
  }
  ends[1].clear();
  engine_ = MakeEngine(0, options, std::move(ends[0]));
}

ForkedPeer::~ForkedPeer() {
  if (pid_ > 0) Kill(SIGKILL);
  if (pid_ > 0) ExitCode();
  engine_->Close(std::chrono::milliseconds(100));
}

void ForkedPeer::Kill(int signal) const { kill(pid_, signal); }

int ForkedPeer::ExitCode() {
  int status = 0;
  waitpid(std::exchange(pid_, 0), &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

int WaitForEver(Engine& /*engine*/) {
  while (true) pause();
}

}  // namespace jaxhet::testing
