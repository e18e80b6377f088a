#ifndef TESTS_SOFTVERBS_LIBRARY_NIC_H_
#define TESTS_SOFTVERBS_LIBRARY_NIC_H_

#include <array>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <random>
#include <string_view>
#include <thread>
#include <vector>

#include "tests/softverbs/library/control.h"
#include "tests/softverbs/library/memory.h"
#include "tests/softverbs/library/objects.h"
#include "tests/softverbs/library/wire.h"
#include "xla_plugin/base/fd.h"

namespace jaxhet::softverbs {

// The NICs of a process, on one thread that runs while one is open. A QP has one request under way:
// the thread of the process that has the other QP executes it, without that program's help, and
// answers.
class Nic final : public Control {
 public:
  static Nic& Get();

  void Add(const Fault& fault) override;
  void Clear() override;
  void SetPort(size_t device, bool is_up) override;
  void SetGid(size_t device, bool is_there) override;
  void SetJitter(std::chrono::microseconds most, uint32_t seed) override;
  void SetRetryInterval(std::chrono::microseconds interval) override;
  int64_t num_objects() override;
  uint64_t num_faults_fired() override;
  uint64_t num_requests() override;

  std::unique_lock<std::mutex> Lock() { return std::unique_lock(mutex_); }

  // The rest needs the lock.

  std::array<Device, 2>& devices() { return devices_; }
  Memory& memory() { return memory_; }
  // The first fault of a kind between `first` and `last` that is due. Counts matches.
  const Fault* Take(FaultKind first, FaultKind last, std::string_view call = {},
                    bool is_dmabuf = false);

  Context* Open(Device& device);
  // 0 or an errno; releases `lock`.
  int Close(Context* context, std::unique_lock<std::mutex>& lock);

  Qp* CreateQp(Pd& pd, const ibv::QpInitAttr& init);
  void DestroyQp(Qp& qp);
  // These return an errno.
  static int ModifyQp(Qp& qp, const ibv::QpAttr& attr, int mask);
  int PostSend(Qp& qp, const ibv::SendWr& request);
  static int PostReceive(Qp& qp, const ibv::RecvWr& request);

 private:
  Nic();

  // The thread.
  void Run();
  void Sleep(std::unique_lock<std::mutex>& lock, bool is_busy);
  void Wake();
  Qp* Find(uint32_t qpn);

  // QPs (qp.cc).
  static void Complete(Qp& qp, ibv::Wc wc, const Queue& queue, uint64_t index);
  static void CompleteSend(Qp& qp, int status);
  static void CompleteReceive(Qp& qp, ibv::Wc wc);
  // The QP fails: its requests are flushed.
  static void Break(Qp& qp);
  static void Fail(Qp& qp, int status);

  // Sending.
  bool Step(Qp& qp, Time now);
  bool Begin(Qp& qp, Work& work, Time now);
  bool HasMemory(const Qp& qp, const Work& work) const;
  Message MakeRequest(const Qp& qp, const Work& work) const;
  void OnResponse(const Message& response);
  void OnDropped(Qp& qp);

  // Receiving. A WC's status for the sender, or one of wire.h's.
  Message Respond(const Message& request);
  int Execute(Qp& qp, const Message& request, Message& response);
  void Write(const Mr& mr, uint64_t address, std::vector<std::byte> bytes);

  std::mutex mutex_;
  std::array<Device, 2> devices_;
  std::vector<Fault> faults_;
  uint64_t num_faults_fired_ = 0;
  Memory memory_;
  Wire wire_;

  int num_contexts_ = 0;
  std::map<uint32_t, Qp*> qps_;
  uint32_t last_qpn_ = 0;
  std::multimap<Time, Message> late_;
  std::chrono::microseconds retry_interval_{5000};
  std::chrono::microseconds jitter_{0};
  uint64_t num_requests_ = 0;
  // NOLINTNEXTLINE(bugprone-random-generator-seed): a run can be repeated
  std::minstd_rand random_{1};

  std::thread thread_;
  Fd wake_;
  bool is_stopping_ = false;
};

}  // namespace jaxhet::softverbs

#endif  // TESTS_SOFTVERBS_LIBRARY_NIC_H_
