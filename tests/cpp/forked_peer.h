#ifndef TESTS_CPP_FORKED_PEER_H_
#define TESTS_CPP_FORKED_PEER_H_

#include <sys/types.h>

#include <functional>
#include <memory>

#include "tests/cpp/world.h"

namespace jaxhet::testing {

// Process 1 in a process of its own; process 0 is here.
class ForkedPeer {
 public:
  using Script = std::function<int(Engine&)>;  // exit code; the engine is set up

  ForkedPeer(const WorldOptions& options, const Script& script);
  ~ForkedPeer();
  ForkedPeer(const ForkedPeer&) = delete;
  ForkedPeer& operator=(const ForkedPeer&) = delete;

  Engine& engine() { return *engine_; }
  void Kill(int signal) const;
  int ExitCode();

 private:
  pid_t pid_;
  std::unique_ptr<Engine> engine_;
};

// A script.
int WaitForEver(Engine& engine);

}  // namespace jaxhet::testing

#endif  // TESTS_CPP_FORKED_PEER_H_
