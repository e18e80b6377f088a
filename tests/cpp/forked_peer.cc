#include "tests/cpp/forked_peer.h"

#include <unistd.h>

#include <csignal>
#include <utility>
#include <vector>

#include "tests/cpp/testing.h"

namespace jaxhet::testing {

ForkedPeer::ForkedPeer(const WorldOptions& options, const Script& script) {
  auto ends = ConnectAll(2);
  pid_ = StartChild([&] {
    ends[0].clear();
    const auto engine = MakeEngine(1, options, std::move(ends[1]));
    SetUpEngine(*engine, options);
    return script(*engine);
  });
  ends[1].clear();
  engine_ = MakeEngine(0, options, std::move(ends[0]));
}

ForkedPeer::~ForkedPeer() {
  if (pid_ > 0) Kill(SIGKILL);
  if (pid_ > 0) ExitCode();
  engine_->Close(std::chrono::milliseconds(100));
}

void ForkedPeer::Kill(int signal) const { kill(pid_, signal); }

int ForkedPeer::ExitCode() { return WaitForChild(std::exchange(pid_, 0)); }

int WaitForEver(Engine& /*engine*/) {
  while (true) pause();
}

}  // namespace jaxhet::testing
