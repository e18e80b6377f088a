#include "xla_plugin/net/verbs/link.h"

#include <chrono>
#include <deque>
#include <string>
#include <utility>

#include "tests/cpp/testing.h"
#include "tests/cpp/world.h"
#include "tests/softverbs/softverbs.h"
#include "xla_plugin/net/verbs/nics.h"

// Two ends of a link, whose completion queues and messages are handled in any order.
namespace jaxhet::testing {
namespace {

constexpr size_t kSlotBytes = 4096;

class End final : public PeerHost {
 public:
  End(const verbs::Options& options, size_t num_slots)
      : nics_(options),
        outgoing_(nics_.Usable(), num_slots, kSlotBytes, ibv::kAccessLocalWrite),
        incoming_(nics_.Usable(), num_slots, kSlotBytes, verbs::kPeerWrites),
        link_(nics_.Usable(), options,
              {.outgoing = outgoing_.slots(),
               .incoming = incoming_.slots(),
               .count = num_slots,
               .chunk_bytes = kSlotBytes},
              *this) {}

  verbs::Link& link() { return link_; }
  // How often a NIC pair of this end was closed.
  int num_closed() const { return num_closed_; }
  // Gives one message to the other end's link. False if there was none.
  bool Deliver(End& to) {
    if (messages_.empty()) return false;
    const std::string message = std::move(messages_.front());
    messages_.pop_front();
    to.link().OnMessage(std::as_bytes(std::span(message)));
    return true;
  }

  void Send(std::span<const iovec> message) override {
    ++num_closed_;
    std::string& text = messages_.emplace_back();
    for (const iovec& part : message)
      text.append(static_cast<const char*>(part.iov_base), part.iov_len);
  }
  void Log(std::string_view /*what*/) override {}
  void Lost(std::string_view why) override { ADD_FAILURE() << why; }

 private:
  verbs::Nics nics_;
  verbs::Staging outgoing_;
  verbs::Staging incoming_;
  verbs::Link link_;
  std::deque<std::string> messages_;
  int num_closed_ = 0;
};

void AwaitArrival(verbs::Link& link) {
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!link.HasArrivals() && std::chrono::steady_clock::now() < limit) link.Poll();
  ASSERT_TRUE(link.HasArrivals());
}

// All queue pairs of a NIC fail while one end does not poll. The completions of all of them fit its
// completion queue, and the chunks travel over the other NIC.
TEST(LinkTest, CompletionsOfAllQueuePairsFit) {
  using Case = std::pair<int64_t, size_t>;
  // 64 slots: a connection over 8 NICs.
  for (const auto& [depth, num_slots] : {Case(1, 8), Case(2, 8), Case(8, 8), Case(8, 64)}) {
    const verbs::Options options = NicOptions(/*qps=*/2, depth);
    End a(options, num_slots);
    End b(options, num_slots);
    b.link().Accept(a.link().Offer());
    a.link().Accept(b.link().Offer());
    b.link().Send(0, kSlotBytes);
    AwaitArrival(a.link());
    a.link().TakeArrival();
    {
      const FaultScope fault(
          "call ibv_post_send errno=12 device=soft0 count=all; gid soft0 1 3 remove");
      a.link().Empty(0);
      for (size_t slot = 0; slot < 4; ++slot) a.link().Send(slot, kSlotBytes);
      while (a.Deliver(b) || b.Deliver(a)) {
      }
      Softverbs::Get().Command("gid soft0 1 3 add");
    }
    EXPECT_EQ(b.num_closed(), 1) << "depth " << depth << ", slots " << num_slots;
    while (a.link().Resend() > 0) {
    }
    // An overrun would be reported after the last completion.
    EXPECT_NO_THROW({
      AwaitArrival(b.link());
      for (int i = 0; i < 20; ++i) b.link().Poll();
    }) << "depth "
       << depth << ", slots " << num_slots;
  }
}

}  // namespace
}  // namespace jaxhet::testing
