#ifndef TESTS_SOFTVERBS_ENDPOINT_H_
#define TESTS_SOFTVERBS_ENDPOINT_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "xla_plugin/net/verbs/verbs_api.h"

namespace jaxhet::testing {

const VerbsApi& Verbs();

struct EndpointOptions {
  std::string_view device = "soft0";
  size_t num_bytes = size_t{1} << 20;
  int cqe = 64;
  uint32_t depth = 16;
  int access = ibv::kAccessLocalWrite | ibv::kAccessRemoteWrite | ibv::kAccessRemoteRead;
  int gid_index = 3;
  uint8_t rnr_retry = 7;
};

// Description of an endpoint for its peer, fixed in width: processes send it to each other.
struct EndpointInfo {
  uint32_t qpn;
  uint32_t rkey;
  uint64_t address;
  ibv::Gid gid;
};

// A device with a buffer, a CQ with a channel, and one QP. All calls of set-up must succeed.
class Endpoint {
 public:
  using Options = EndpointOptions;

  explicit Endpoint(const Options& options = {});
  ~Endpoint();
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  EndpointInfo info() const;
  void ToInit();
  void ToReadyToReceive(const EndpointInfo& peer);
  void ToReadyToSend();
  void Connect(const EndpointInfo& peer);
  int Modify(ibv::QpAttr attr, int mask) { return Verbs().modify_qp(qp_, &attr, mask); }
  int State();

  ibv::Context* context() { return context_; }
  ibv::Pd* pd() { return pd_; }
  ibv::Mr* mr() { return mr_; }
  ibv::Cq* cq() { return cq_; }
  ibv::CompChannel* channel() { return channel_; }
  ibv::Qp* qp() { return qp_; }
  std::vector<std::byte>& bytes() { return bytes_; }

  ibv::Sge SgeOf(size_t offset, size_t num_bytes);
  // These return errno. `imm` is negative for none.
  int Write(const EndpointInfo& peer, size_t offset, size_t num_bytes, int64_t imm = -1,
            uint64_t wr_id = 1, unsigned flags = ibv::kSendSignaled);
  int Read(const EndpointInfo& peer, size_t offset, size_t num_bytes);
  int Send(size_t offset, size_t num_bytes, unsigned flags = ibv::kSendSignaled);
  int Receive(uint64_t wr_id = 100, size_t offset = 0, size_t num_bytes = 0);

  // The next completion; a failure and status -1 if none comes within the time.
  ibv::Wc Wait(std::chrono::milliseconds limit = std::chrono::seconds(10));
  bool HasCompletion();
  // The next async event's type, or -1 if none comes.
  int WaitEvent(std::chrono::milliseconds limit = std::chrono::seconds(5));

 private:
  void Release();
  // The constructor's last act.
  [[noreturn]] void Refuse(std::string_view what);
  int Post(ibv::SendWr wr, ibv::Sge sge);

  Options options_;
  ibv::Context* context_ = nullptr;
  ibv::Pd* pd_ = nullptr;
  std::vector<std::byte> bytes_;
  ibv::Mr* mr_ = nullptr;
  ibv::CompChannel* channel_ = nullptr;
  ibv::Cq* cq_ = nullptr;
  ibv::Qp* qp_ = nullptr;
};

// Two endpoints of this process, connected.
struct Pair {
  explicit Pair(const EndpointOptions& options = {}) : a(options), b(options) {
    a.Connect(b.info());
    b.Connect(a.info());
  }
  Endpoint a;
  Endpoint b;
};

}  // namespace jaxhet::testing

#endif  // TESTS_SOFTVERBS_ENDPOINT_H_
