#ifndef TESTS_SOFTVERBS_LIBRARY_NIC_H_
#define TESTS_SOFTVERBS_LIBRARY_NIC_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <string_view>
#include <thread>

#include "tests/softverbs/library/fabric.h"
#include "tests/softverbs/library/faults.h"
#include "tests/softverbs/library/memory.h"
#include "tests/softverbs/library/objects.h"
#include "tests/softverbs/library/packet.h"
#include "tests/softverbs/library/wire.h"
#include "xla_plugin/base/fd.h"

namespace jaxhet::softverbs {

// Hardware of a process, on one thread that runs while a device is open. A QP's
// requester (requester.cc) sends a request's next packet; the responder (responder.cc) of the
// process that has the other QP executes it, without that program's help, and answers.
class Nic {
 public:
  static Nic& Get();

  // For the program's threads; the NIC's own lets them pass.
  std::unique_lock<std::mutex> Lock();

  // The rest needs the lock.

  Fabric& fabric() { return fabric_; }
  Faults& faults() { return faults_; }
  Memory& memory() { return memory_; }

  Context* Open(DeviceModel& model);
  // 0 or an errno; releases `lock`.
  int Close(Context* context, std::unique_lock<std::mutex>& lock);

  Qp* CreateQp(Pd& pd, const ibv::QpInitAttr& init);
  int DestroyQp(Qp& qp);
  int ModifyQp(Qp& qp, const ibv::QpAttr& attr, int mask);
  int PostSend(Qp& qp, const ibv::SendWr& request);
  int PostReceive(Qp& qp, const ibv::RecvWr& request);

  // Commands (control.cc). Returns the error of `text`, or "".
  std::string Command(std::string_view text);
  void SetPort(DeviceModel& model, int port, bool is_up);
  void SetGid(DeviceModel& model, int port, int index, bool is_there);
  // False if the QP does not exist.
  bool BreakQp(uint32_t qpn);
  // Whatever was to happen later happens now.
  void Release();
  // Answer of softverbs_query().
  std::string Describe(std::string_view what) const;
  void set_retry_interval(std::chrono::microseconds interval) { retry_interval_ = interval; }
  void SetJitter(std::chrono::microseconds most, uint32_t seed);
  void Broadcast(std::string_view command);
  // Wakes the NIC's thread after a change.
  void Wake();

  int num_pds = 0;
  int num_cqs = 0;
  int num_channels = 0;

 private:
  Nic();

  // The thread (nic.cc).
  void Run();
  bool TakePackets();
  bool SendLate(Time now);
  bool StepAll(Time now);
  void Sleep(std::unique_lock<std::mutex>& lock);
  Time NextWake() const;
  void Handle(Packet packet);
  // False if no process listens there.
  bool Send(Packet packet);
  Qp* Find(uint32_t qpn);

  // QPs (qp.cc).
  void AddCompletion(Qp& qp, bool is_receive, const Completion& completion, bool is_solicited);
  void Flush(Qp& qp);
  // The QP fails: its requests are flushed.
  void Break(Qp& qp);
  void CompleteSend(Qp& qp, int status);
  void CompleteReceive(Qp& qp, ibv::Wc wc, bool is_solicited);

  // The requester (requester.cc).
  bool Step(Qp& qp, Time now);
  bool Begin(Qp& qp, Work& work, Time now);
  Packet MakeRequest(const Qp& qp, const Work& work, uint64_t offset, uint32_t psn) const;
  void SendRequest(Qp& qp, const Work& work, Time now);
  // Keeps the packets of all requests of `qp` to send them later.
  void Haunt(const Qp& qp, Time when);
  void Fail(Qp& qp, int status);
  void OnResponse(const Packet& packet);
  void OnAck(Qp& qp, const Packet& packet);
  void OnDropped(Qp& qp);
  void OnNotReady(Qp& qp, uint32_t rnr_timer);

  // The responder (responder.cc).
  Packet Respond(const Packet& request);
  static bool Accepts(const Qp& qp, const PacketInfo& request);
  // A WC's status for the requester, or one of packet.h's.
  int Execute(Qp& qp, const Packet& request, Packet& response);
  int ExecuteWrite(Qp& qp, const Packet& request);
  int ExecuteSend(Qp& qp, const Packet& request);
  int ExecuteRead(Qp& qp, const Packet& request, Packet& response);
  const Mr* FindRemote(Qp& qp, const PacketInfo& request, int access);

  std::mutex mutex_;
  std::atomic<int> num_waiting_ = 0;  // threads of the program that want the mutex
  Fabric fabric_;
  Faults faults_;
  Memory memory_;
  Wire wire_;

  std::set<Context*> contexts_;
  std::map<uint32_t, Qp*> qps_;
  uint32_t last_qpn_ = 0;
  std::deque<Packet> local_;  // to this process
  std::multimap<Time, Packet> late_;
  std::chrono::microseconds retry_interval_{5000};  // after a packet that is known to be lost
  std::chrono::microseconds jitter_{0};
  uint64_t num_requests_ = 0;
  // NOLINTNEXTLINE(bugprone-random-generator-seed): a run can be repeated
  std::minstd_rand random_{1};

  std::thread thread_;
  Fd wake_;
  bool is_stopping_ = false;
  bool is_asleep_ = false;
};

}  // namespace jaxhet::softverbs

#endif  // TESTS_SOFTVERBS_LIBRARY_NIC_H_
