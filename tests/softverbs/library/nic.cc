#include "tests/softverbs/library/nic.h"

#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "xla_plugin/base/error.h"
#include "xla_plugin/base/thread.h"

namespace jaxhet::softverbs {
namespace {

constexpr int kMaxYields = 100;  // yields for the program's threads

std::string Environment(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

}  // namespace

Nic& Nic::Get() {
  static auto* const nic = new Nic;
  return *nic;
}

Nic::Nic() : wire_(Environment("SOFTVERBS_FABRIC")) {
  memory_.damage = [this](const Mr& mr) {
    Site site;
    site.device = mr.context->device->name.data();
    site.is_dmabuf = mr.is_dmabuf;
    const Fault* const fault = faults_.Take(FaultKind::kLose, FaultKind::kGarble, site);
    if (fault == nullptr) return Damage::kNone;
    return fault->kind == FaultKind::kLose ? Damage::kLost : Damage::kGarbled;
  };
  const std::string problem = Command(Environment("SOFTVERBS_COMMANDS"));
  if (!problem.empty()) Throw(ErrorCode::kUsage, "SOFTVERBS_COMMANDS: ", problem);
}

std::unique_lock<std::mutex> Nic::Lock() {
  ++num_waiting_;
  std::unique_lock lock(mutex_);
  --num_waiting_;
  return lock;
}

Context* Nic::Open(DeviceModel& model) {
  if (contexts_.empty()) {
    wire_.Open();
    wake_ = Fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    is_stopping_ = false;
    thread_ = StartThread("softverbs", [this] { Run(); });
  }
  auto* const context = new Context;
  static_cast<ibv::Context&>(*context) = {};
  context->device = &model;
  context->model = &model;
  context->cmd_fd = -1;
  context->async_fd = -1;
  context->num_comp_vectors = 1;
  contexts_.insert(context);
  return context;
}

int Nic::Close(Context* context, std::unique_lock<std::mutex>& lock) {
  if (context->num_objects != 0) return EBUSY;
  contexts_.erase(context);
  delete context;
  if (!contexts_.empty()) return 0;
  is_stopping_ = true;
  Wake();
  std::thread thread = std::move(thread_);
  lock.unlock();
  thread.join();
  lock.lock();
  if (contexts_.empty()) wire_.Close();
  return 0;
}

void Nic::Run() {
  std::unique_lock lock(mutex_);
  while (!is_stopping_) {
    const Time now = Clock::now();
    bool was_busy = TakePackets();
    was_busy |= SendLate(now);
    was_busy |= StepAll(now);
    if (!was_busy) {
      Sleep(lock);
      continue;
    }
    lock.unlock();
    for (int i = 0; i < kMaxYields && num_waiting_ > 0; ++i) std::this_thread::yield();
    lock.lock();
  }
}

bool Nic::TakePackets() {
  std::deque<Packet> packets = std::exchange(local_, {});
  const auto lose = [this](uint32_t process) {
    for (auto& [qpn, qp] : qps_) {
      if (!qp->is_waiting || qp->attr.dest_qp_num / kQpsOfProcess != process) continue;
      qp->is_waiting = false;
      OnDropped(*qp);
    }
  };
  for (Packet& packet : wire_.Receive(lose)) packets.push_back(std::move(packet));
  const bool had_some = !packets.empty();
  for (Packet& packet : packets) Handle(std::move(packet));
  return had_some;
}

void Nic::Handle(Packet packet) {
  switch (packet.info.kind) {
    case PacketKind::kRequest:
      Send(Respond(packet));
      return;
    case PacketKind::kResponse:
      OnResponse(packet);
      return;
    case PacketKind::kCommand: {
      const std::string_view text(reinterpret_cast<const char*>(packet.bytes.data()),
                                  packet.bytes.size());
      const std::string problem = Command(text);
      if (!problem.empty()) LogLine(StrCat("softverbs: ", problem));
      return;
    }
  }
}

bool Nic::SendLate(Time now) {
  bool had_some = false;
  while (!late_.empty() && late_.begin()->first <= now) {
    Send(std::move(late_.extract(late_.begin()).mapped()));
    had_some = true;
  }
  return had_some;
}

bool Nic::StepAll(Time now) {
  bool was_busy = false;
  for (const auto& [qpn, qp] : qps_) was_busy |= Step(*qp, now);
  return was_busy;
}

bool Nic::Send(Packet packet) {
  const uint32_t process = packet.info.to_qpn / kQpsOfProcess;
  if (process != wire_.process()) return wire_.Send(process, packet);
  local_.push_back(std::move(packet));
  return true;
}

void Nic::Broadcast(std::string_view command) {
  Packet packet;
  packet.info.kind = PacketKind::kCommand;
  packet.bytes.resize(command.size());
  std::memcpy(packet.bytes.data(), command.data(), command.size());
  for (const uint32_t process : wire_.OtherProcesses()) wire_.Send(process, packet);
}

Time Nic::NextWake() const {
  Time next = late_.empty() ? Time::max() : late_.begin()->first;
  for (const auto& [qpn, qp] : qps_) {
    if (qp->now == ibv::kQpStateRts && !qp->sends.empty()) next = std::min(next, qp->wake_at);
  }
  return local_.empty() ? next : Time::min();
}

void Nic::Sleep(std::unique_lock<std::mutex>& lock) {
  std::vector<pollfd> fds = {{.fd = wake_.get(), .events = POLLIN, .revents = 0}};
  wire_.AppendFds(fds);
  const Time next = NextWake();
  constexpr std::chrono::nanoseconds kLongest = std::chrono::seconds(10);
  const std::chrono::nanoseconds pause =
      next == Time::max() ? kLongest : std::clamp(next - Clock::now(), 0 * kLongest, kLongest);
  const timespec limit{.tv_sec = pause.count() / 1000000000, .tv_nsec = pause.count() % 1000000000};
  is_asleep_ = true;
  lock.unlock();
  ppoll(fds.data(), fds.size(), &limit, nullptr);
  lock.lock();
  is_asleep_ = false;
  eventfd_t ignored = 0;
  eventfd_read(wake_.get(), &ignored);
}

void Nic::Wake() {
  if (is_asleep_) eventfd_write(wake_.get(), 1);
}

Qp* Nic::Find(uint32_t qpn) {
  const auto found = qps_.find(qpn);
  return found == qps_.end() ? nullptr : found->second;
}

void Nic::SetJitter(std::chrono::microseconds most, uint32_t seed) {
  jitter_ = most;
  random_.seed(seed);
}

void Nic::SetPort(DeviceModel& model, int port, bool is_up) { model.FindPort(port)->is_up = is_up; }

void Nic::SetGid(DeviceModel& model, int port, int index, bool is_there) {
  model.FindPort(port)->gids.at(static_cast<size_t>(index)).is_there = is_there;
}

bool Nic::BreakQp(uint32_t qpn) {
  Qp* const qp = Find(qpn);
  if (qp == nullptr) return false;
  Break(*qp);
  return true;
}

void Nic::Release() {
  faults_.ClearDelays();
  for (auto& [qpn, qp] : qps_) {
    if (!qp->is_waiting) qp->wake_at = {};
  }
  std::multimap<Time, Packet> late;
  late.swap(late_);
  for (auto& [when, packet] : late) late_.emplace(Time{}, std::move(packet));
}

std::string Nic::Describe(std::string_view what) const {
  if (what == "faults") return std::to_string(faults_.num_fired());
  if (what == "requests") return std::to_string(num_requests_);
  if (what == "qps") {
    std::string text;
    for (const auto& [qpn, qp] : qps_) text += StrCat(qpn, " ");
    return text;
  }
  return StrCat("contexts ", contexts_.size(), " pds ", num_pds, " mrs ", memory_.size(), " cqs ",
                num_cqs, " channels ", num_channels, " qps ", qps_.size());
}

}  // namespace jaxhet::softverbs
