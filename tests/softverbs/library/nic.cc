#include "tests/softverbs/library/nic.h"

#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>

#include "tests/cpp/host_device.h"
#include "xla_plugin/base/error.h"
#include "xla_plugin/base/thread.h"
#include "xla_plugin/device/device.h"

namespace jaxhet::softverbs {
namespace {

constexpr size_t kChosenGid = 3;

ibv::Gid LinkLocal(uint8_t host) {
  ibv::Gid gid;
  gid.raw = {0xfe, 0x80, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0xff, 0xfe, 0, 0, host};
  return gid;
}

// 127.0.0.<host>, as an IPv6 address: the machine routes it.
ibv::Gid Ipv4(uint8_t host) {
  ibv::Gid gid;
  gid.raw = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127, 0, 0, host};
  return gid;
}

// Knows the memory of a device, and the host's.
auto CopyByDevice(const std::string& name) {
  // Never closed: the driver may go first.
  const Vendor& vendor = testing::TestVendorOf(name);
  auto* const device = vendor.open(vendor.libraries, 0).release();
  const auto* const stream = new Stream(device->CreateStream(StreamPriority::kHigh));
  return [device, stream](void* to, const void* from, size_t num_bytes) {
    device->Copy(stream->get(), to, from, num_bytes);
    device->Synchronize(stream->get());
  };
}

}  // namespace

Nic& Nic::Get() {
  static auto* const nic = new Nic;
  return *nic;
}

Nic::Nic() {
  for (size_t i = 0; i < devices_.size(); ++i) {
    Device& device = devices_.at(i);
    static_cast<ibv::Device&>(device) = {};
    const std::string name = StrCat("soft", i);
    std::ranges::copy(name, device.name.begin());
    // The folder does not exist: files read from there are absent, as in a container.
    std::ranges::copy(StrCat("/sys/class/infiniband/", name), device.ibdev_path.begin());
    // The order of drivers: the link-local ones come first, and are not what one wants.
    const auto host = static_cast<uint8_t>(1 + 8 * i);
    device.gids = {{{.gid = LinkLocal(host), .type = ibv::kGidTypeRoceV1},
                    {.gid = LinkLocal(host), .type = ibv::kGidTypeRoceV2},
                    {.gid = Ipv4(host), .type = ibv::kGidTypeRoceV1},
                    {.gid = Ipv4(host), .type = ibv::kGidTypeRoceV2}}};
  }
  const char* const vendor = std::getenv("SOFTVERBS_COPY");
  if (vendor != nullptr && *vendor != '\0') memory_.copy = CopyByDevice(vendor);
}

void Nic::Add(const Fault& fault) {
  const auto lock = Lock();
  faults_.push_back(fault);
}

void Nic::Clear() {
  const auto lock = Lock();
  faults_.clear();
  jitter_ = {};
}

void Nic::SetPort(size_t device, bool is_up) {
  const auto lock = Lock();
  devices_.at(device).is_up = is_up;
}

void Nic::SetGid(size_t device, bool is_there) {
  const auto lock = Lock();
  devices_.at(device).gids.at(kChosenGid).is_there = is_there;
}

void Nic::SetJitter(std::chrono::microseconds most, uint32_t seed) {
  const auto lock = Lock();
  jitter_ = most;
  random_.seed(seed);
}

void Nic::SetRetryInterval(std::chrono::microseconds interval) {
  const auto lock = Lock();
  retry_interval_ = interval;
}

int64_t Nic::num_objects() {
  const auto lock = Lock();
  return Object::num_open;
}

uint64_t Nic::num_faults_fired() {
  const auto lock = Lock();
  return num_faults_fired_;
}

uint64_t Nic::num_requests() {
  const auto lock = Lock();
  return num_requests_;
}

const Fault* Nic::Take(FaultKind first, FaultKind last, std::string_view call, bool is_dmabuf) {
  const Fault* due = nullptr;
  for (Fault& fault : faults_) {
    if (fault.kind < first || fault.kind > last || fault.call != call) continue;
    if (fault.only_dmabuf && !is_dmabuf) continue;
    const uint64_t match = fault.matches++;
    if (due == nullptr && match >= fault.after && match - fault.after < fault.count) due = &fault;
  }
  if (due != nullptr) ++num_faults_fired_;
  return due;
}

Context* Nic::Open(Device& device) {
  if (num_contexts_++ == 0) {
    wire_.Open();
    wake_ = Fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    is_stopping_ = false;
    thread_ = StartThread("softverbs", [this] { Run(); });
  }
  auto* const context = new Context;
  static_cast<ibv::Context&>(*context) = {};
  context->device = &device;
  context->cmd_fd = -1;
  context->async_fd = -1;
  context->num_comp_vectors = 1;
  return context;
}

int Nic::Close(Context* context, std::unique_lock<std::mutex>& lock) {
  if (context->is_used()) return EBUSY;
  delete context;
  if (--num_contexts_ > 0) return 0;
  is_stopping_ = true;
  Wake();
  std::thread thread = std::move(thread_);
  lock.unlock();
  thread.join();
  lock.lock();
  if (num_contexts_ == 0) wire_.Close();
  return 0;
}

void Nic::Run() {
  std::unique_lock lock(mutex_);
  while (!is_stopping_) {
    const Time now = Clock::now();
    const std::vector<Message> messages = wire_.Receive();
    for (const Message& message : messages) {
      if (message.info.is_response != 0) {
        OnResponse(message);
      } else {
        wire_.Send(Respond(message));
      }
    }
    while (!late_.empty() && late_.begin()->first <= now) {
      wire_.Send(std::move(late_.extract(late_.begin()).mapped()));
    }
    bool is_busy = !messages.empty();
    for (const auto& [qpn, qp] : qps_) is_busy |= Step(*qp, now);
    Sleep(lock, is_busy);
  }
}

void Nic::Sleep(std::unique_lock<std::mutex>& lock, bool is_busy) {
  std::vector<pollfd> fds = {{.fd = wake_.get(), .events = POLLIN, .revents = 0}};
  wire_.AppendFds(fds);
  const Time now = Clock::now();
  Time next = now + std::chrono::seconds(is_busy ? 0 : 10);
  if (!late_.empty()) next = std::min(next, late_.begin()->first);
  for (const auto& [qpn, qp] : qps_) {
    if (qp->now == ibv::kQpStateRts && !qp->sends.empty()) next = std::min(next, qp->wake_at);
  }
  const std::chrono::nanoseconds pause = std::max(next, now) - now;
  const timespec limit{.tv_sec = pause.count() / 1000000000, .tv_nsec = pause.count() % 1000000000};
  lock.unlock();
  ppoll(fds.data(), fds.size(), &limit, nullptr);
  lock.lock();
  eventfd_t ignored = 0;
  eventfd_read(wake_.get(), &ignored);
}

void Nic::Wake() { eventfd_write(wake_.get(), 1); }

Qp* Nic::Find(uint32_t qpn) {
  const auto found = qps_.find(qpn);
  return found == qps_.end() ? nullptr : found->second;
}

}  // namespace jaxhet::softverbs

// NOLINTNEXTLINE(readability-identifier-naming,misc-use-internal-linkage)
extern "C" __attribute__((visibility("default"))) jaxhet::softverbs::Control* softverbs_control() {
  return &jaxhet::softverbs::Nic::Get();
}
