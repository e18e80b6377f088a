#ifndef TESTS_CPP_LIAR_H_
#define TESTS_CPP_LIAR_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tests/cpp/testing.h"
#include "tests/cpp/world.h"

namespace jaxhet::testing {

// The processes from 1 on, played by the test: they introduce themselves well and then say what the
// test wants. Process 0 is an engine with rank 0.
class Liar {
 public:
  // Header of a chunk, as in `socket`; the bytes follow it.
  struct Chunk {
    uint32_t magic = 0x3143'584a;
    uint32_t reserved = 0;
    uint64_t ticket = 2;  // ticket of rank 0's transfer with rank 1
    uint64_t offset = 0;
    uint64_t num_bytes = 4'000;
  };

  explicit Liar(int num_processes = 2, std::vector<std::string> transports = {"socket"},
                bool knows_ranks = true);
  ~Liar();
  Liar(const Liar&) = delete;
  Liar& operator=(const Liar&) = delete;

  void SendPlan();
  void SendPlan(const PlanInfo& info, std::string_view texts);
  void SendStart(const StartInfo& info, std::string_view tail = {});
  void SendChunk(const Chunk& chunk, std::string_view bytes) const;
  // Waits until rank 0 has started so many exchanges.
  void AwaitStarts(uint64_t count) const;
  // Waits until all that process 1 has sent is read.
  void AwaitArrival();
  void ExpectRefusal(std::string_view words, const Location& location = Location::current()) const;

  Engine& engine() { return *engine_; }
  ControlChannel& channel() { return channels_.front(); }  // process 1's
  const Fd& data() const { return data_.front(); }

 private:
  std::vector<ControlChannel> channels_;
  std::vector<Fd> data_;
  std::unique_ptr<Engine> engine_;
};

}  // namespace jaxhet::testing

#endif  // TESTS_CPP_LIAR_H_
