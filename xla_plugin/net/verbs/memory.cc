#include "xla_plugin/net/verbs/memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <new>
#include <thread>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"
#include "xla_plugin/base/huge_pages.h"

namespace jaxhet::verbs {
namespace {

// Rights of a NIC that writes and reads its own memory as a peer's would: to prove it, and to
// flush.
constexpr int kAccess = kPeerWrites | ibv::kAccessRemoteRead;
constexpr int kRounds = 2;  // the second one would expose older bytes
constexpr size_t kCopied = 4096;
constexpr std::chrono::seconds kLoopbackTimeout{2};
constexpr int kNumEntries = 16;
constexpr size_t kReadBytes = 64;
constexpr std::chrono::seconds kWriteTimeout{10};

// Writes memory as an exchange writes slots, and learns as an exchange does that it is written. The
// host does not wait for the device: that would empty the caches of an AMD GPU.
class PatternWriter {
 public:
  explicit PatternWriter(Device& device)
      : device_(device),
        word_(device.AllocatePinned(sizeof(uint32_t))),
        program_(device.CreateStream(StreamPriority::kNormal)) {
    new (word_.get()) uint32_t(0);
  }
  ~PatternWriter() {
    try {
      device_.Synchronize(program_.get());
    } catch (const Error& error) {
      LogLine(error.what());
    }
  }
  PatternWriter(const PatternWriter&) = delete;
  PatternWriter& operator=(const PatternWriter&) = delete;

  // Writes other bytes than the last time, and returns them.
  std::vector<std::byte> Write(std::span<std::byte> place) {
    ++number_;
    const size_t half = place.size() / 2;
    std::vector<std::byte> pattern(place.size(), std::byte(2 * number_));
    std::fill_n(pattern.begin(), half, std::byte(2 * number_ + 1));
    device_.Fill(program_.get(), place.data(), pattern.front(), half);
    device_.Fill(program_.get(), place.data() + half, pattern.back(), place.size() - half);
    device_.WriteValue(program_.get(), device_.DeviceAddress(word_.get()), number_);
    const std::atomic_ref word(*static_cast<uint32_t*>(word_.get()));
    const auto limit = std::chrono::steady_clock::now() + kWriteTimeout;
    while (word.load(std::memory_order_acquire) < number_) {
      if (std::chrono::steady_clock::now() >= limit) {
        Throw(ErrorCode::kDevice, device_.info().ToString(), " has not filled ", place.size(),
              " bytes within ", kWriteTimeout.count(), " s");
      }
      std::this_thread::yield();
    }
    return pattern;
  }

 private:
  Device& device_;
  PinnedMemory word_;
  Stream program_;
  uint32_t number_ = 0;
};

}  // namespace

NicMemory::NicMemory(NicList nics, std::span<std::byte> memory, int access, const DmaBuf* dma_buf)
    : nics_(nics.begin(), nics.end()) {
  for (const auto& nic : nics) regions_.emplace_back(nic->domain, memory, access, dma_buf);
}

Staging::Staging(NicList nics, size_t num_slots, size_t slot_bytes, int access)
    : slot_bytes_(slot_bytes) {
  const size_t num_bytes = CheckedMultiply(num_slots, slot_bytes);
  void* const address =
      mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (address == MAP_FAILED) ThrowErrno("mmap");
  memory_ = {static_cast<std::byte*>(address), num_bytes};
  AdviseHugePages(memory_);
  madvise(address, num_bytes, MADV_DONTFORK);
  try {
    region_ = std::make_unique<NicMemory>(nics, memory_, access);
  } catch (const Error&) {
    munmap(address, num_bytes);
    throw;
  }
}

Staging::~Staging() {
  region_.reset();
  munmap(memory_.data(), memory_.size());
}

// A queue pair that is connected with itself: the NIC reads and writes registered memory as it does
// for a peer. Functions block, for two seconds at most, and throw TransportError, after which the
// queue pair is of no use.
class DeviceSlots::Loopback {
 public:
  Loopback(const std::shared_ptr<Nic>& nic, const Options& options)
      : nic_(*nic),
        host_({&nic, 1}, 1, kReadBytes, kPeerWrites),
        cq_(*nic->context, kNumEntries),
        qp_(nic->domain, cq_, {.sends = 1, .receives = 1}, nic->info.port,
            static_cast<uint16_t>(options.pkey_index),
            ibv::kAccessRemoteWrite | ibv::kAccessRemoteRead) {
    NicPairInfo itself = InfoOf(nic_.info);
    itself.qp_num = qp_.number();
    itself.psn = qp_.psn();
    qp_.Connect(nic_.info, options, itself);
  }

  const std::string& name() const { return nic_.info.name; }

  // Copies bytes of a region to another place there, by an RDMA write.
  void Copy(const MemoryRegion& region, std::span<const std::byte> from, const std::byte* to) {
    Execute(ibv::kWrRdmaWrite, {reinterpret_cast<uint64_t>(from.data()), region},
            {reinterpret_cast<uint64_t>(to), region}, from.size());
  }

  // Makes the NIC's writes visible to the device that owns the memory: a read pushes the writes
  // before it to where they go.
  void Flush(const MemoryRegion& region, uint64_t address) {
    const SlotMemory host = host_.slots();
    Execute(ibv::kWrRdmaRead, {host.address(0), host.memory->region(0)}, {address, region}, 1);
  }

 private:
  struct Memory {
    uint64_t address;
    const MemoryRegion& region;
  };

  void Execute(int opcode, const Memory& local, const Memory& remote, size_t num_bytes) {
    ibv::Sge sge{.addr = local.address,
                 .length = static_cast<uint32_t>(num_bytes),
                 .lkey = local.region.lkey()};
    ibv::SendWr wr;
    wr.wr_id = ++last_wr_id_;
    wr.sg_list = &sge;
    wr.num_sge = 1;
    wr.opcode = opcode;
    wr.send_flags = ibv::kSendSignaled;
    wr.remote_addr = remote.address;
    wr.rkey = remote.region.rkey();
    if (const int error = qp_.PostSend(wr)) ThrowCall("ibv_post_send", nic_.info.name, error);
    Await(wr.wr_id);
  }

  void Await(uint64_t wr_id) {
    const auto limit = std::chrono::steady_clock::now() + kLoopbackTimeout;
    std::array<ibv::Wc, 1> buffer;
    while (std::chrono::steady_clock::now() < limit) {
      const auto completions = cq_.Poll(buffer, nic_.info.name);
      if (completions.empty() || completions.front().wr_id != wr_id) continue;
      if (completions.front().status == ibv::kWcSuccess) return;
      Throw(ErrorCode::kTransport, nic_.info.name,
            " to itself: ", Describe(nic_.context->api(), completions.front()));
    }
    Throw(ErrorCode::kTransport, nic_.info.name, " to itself: no completion within ",
          kLoopbackTimeout.count(), " s");
  }

  Nic& nic_;
  Staging host_;
  CompletionQueue cq_;
  QueuePair qp_;
  uint64_t last_wr_id_ = 0;
};

DeviceSlots::DeviceSlots(Device& device, NicList nics, const Options& options, size_t num_slots,
                         size_t slot_bytes)
    : device_(device) {
  const size_t num_bytes = CheckedMultiply(num_slots, slot_bytes);
  try {
    device_memory_ = device.Allocate(num_bytes);
    device_address_ = device_memory_.get();
    bytes_ = {static_cast<std::byte*>(device_address_), num_bytes};
    for (const auto& nic : nics) loopbacks_.push_back(std::make_unique<Loopback>(nic, options));
    const DmaBuf dma_buf = device.ExportDmaBuf(bytes_.data(), num_bytes);
    region_ = std::make_unique<NicMemory>(nics, bytes_, kAccess, &dma_buf);
    Prove();
  } catch (const Error& error) {
    why_pinned_ = error.text();
    region_.reset();
    loopbacks_.clear();
    device_memory_ = {};
    pinned_memory_ = device.AllocatePinned(num_bytes);
    device_address_ = device.DeviceAddress(pinned_memory_.get());
    bytes_ = {static_cast<std::byte*>(pinned_memory_.get()), num_bytes};
    region_ = std::make_unique<NicMemory>(nics, bytes_, kPeerWrites);
  }
  slots_ = {region_.get(), bytes_.data(), slot_bytes};
}

DeviceSlots::DeviceSlots(Device& device, SlotMemory slots, void* device_address)
    : device_(device),
      slots_(slots),
      device_address_(device_address),
      why_pinned_("the program needed this path after the start") {}

DeviceSlots::~DeviceSlots() = default;

void DeviceSlots::Flush(size_t slot, size_t nic) {
  if (!loopbacks_.empty()) loopbacks_[nic]->Flush(region_->region(nic), slots_.address(slot));
}

void DeviceSlots::Prove() {
  PatternWriter writer(device_);
  const std::span<std::byte> from = bytes_.first(kCopied);
  const std::span<std::byte> to = bytes_.last(kCopied);
  for (size_t nic = 0; nic < loopbacks_.size(); ++nic) {
    for (int i = 0; i < kRounds; ++i) {
      const std::vector<std::byte> proof = writer.Write(from);
      loopbacks_[nic]->Copy(region_->region(nic), from, to.data());
      loopbacks_[nic]->Flush(region_->region(nic), reinterpret_cast<uint64_t>(to.data()));
      if (HasProof(device_, to.data(), proof)) continue;
      Throw(ErrorCode::kTransport, device_.info().ToString(), " does not see what ",
            loopbacks_[nic]->name(), " copied in its memory: what it wrote there, or what the NIC ",
            "wrote, is stale");
    }
  }
}

}  // namespace jaxhet::verbs
