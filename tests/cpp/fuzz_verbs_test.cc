#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/cpp/fuzz.h"
#include "tests/cpp/testing.h"
#include "tests/cpp/world.h"
#include "xla_plugin/base/error.h"
#include "xla_plugin/net/verbs/verbs_connection.h"
#include "xla_plugin/net/verbs/wire.h"

// Headers and immediate data that a peer's NIC writes.
namespace jaxhet::testing {
namespace {

using ::testing::HasSubstr;

using std::chrono::milliseconds;
using verbs::ChunkInfo;
using verbs::Immediate;
using verbs::ImmediateKind;

constexpr size_t kChunkBytes = 4'096;
constexpr size_t kTransferBytes = 10'000;
constexpr size_t kNumSlots = 4;

verbs::Nics& TheNics() {
  static auto* const nics = new verbs::Nics(NicOptions(/*depth=*/2));
  return *nics;
}

// The peer's end of a connection, with queue pairs of one NIC, over which a test sends anything.
class VerbsLiar {
 public:
  std::string Offer() const {
    std::string offer = BytesOf(verbs::OfferInfo{.magic = verbs::kOfferMagic,
                                                 .num_nic_pairs = 1,
                                                 .num_slots = kNumSlots,
                                                 .slot_bytes = kChunkBytes,
                                                 .chunk_bytes = kChunkBytes,
                                                 .slots = incoming_.slots().address(0),
                                                 .headers = headers_.slots().address(0)});
    verbs::NicPairInfo info = verbs::InfoOf(nic_.info);
    info.rkey = incoming_.slots().rkey(0);
    info.headers_rkey = headers_.slots().rkey(0);
    info.qp_num = qp_.number();
    info.psn = qp_.psn();
    return offer + BytesOf(info);
  }

  void Accept(std::string_view offer) {
    InputReader reader(offer);
    theirs_ = reader.Take<verbs::OfferInfo>();
    nic_pair_ = reader.Take<verbs::NicPairInfo>();
    verbs::Route route = verbs::RouteOf(nic_.info, TheNics().options());
    route.qp_num = nic_pair_.qp_num;
    route.psn = nic_pair_.psn;
    for (int i = 0; i < 64; ++i) PostReceive();
    qp_.Connect(route);
  }

  // Writes a header into the slot that the immediate names, or another one, and waits until both
  // have arrived.
  void Send(std::string_view header, uint32_t immediate) {
    const Immediate unpacked = verbs::UnpackImmediate(immediate);
    header = header.substr(0, verbs::kHeaderBytes);
    std::memset(outgoing_.slot(0), 0, verbs::kHeaderBytes);
    std::memcpy(outgoing_.slot(0), header.data(), header.size());
    const verbs::Write write{
        .from = outgoing_.slots().address(0),
        .lkey = outgoing_.slots().lkey(0),
        .num_bytes = verbs::kHeaderBytes,
        .to = theirs_.headers + unpacked.slot % theirs_.num_slots * verbs::kHeaderBytes,
        .rkey = nic_pair_.headers_rkey};
    if (qp_.PostWrite(write, unpacked) != 0) ThrowErrno("ibv_post_send");
    while (!HasSent()) std::this_thread::yield();
  }

 private:
  void PostReceive() const {
    if (qp_.PostReceive() != 0) ThrowErrno("ibv_post_recv");
  }
  // Whether a send has completed. Drops all completions.
  bool HasSent() {
    bool has_sent = false;
    std::array<ibv::Wc, 16> completions;
    for (const ibv::Wc& wc : cq_.Poll(completions, "soft0:1")) {
      if (wc.status != ibv::kWcSuccess) Throw(ErrorCode::kTransport, "a send failed");
      const bool is_receive = wc.wr_id == verbs::QueuePair::kReceiveId;
      if (is_receive) PostReceive();
      has_sent |= !is_receive;
    }
    return has_sent;
  }

  std::vector<std::shared_ptr<verbs::Nic>> nics_{TheNics().Usable().front()};
  verbs::Nic& nic_ = *nics_.front();
  verbs::CompletionQueue cq_{*nic_.context, 512};
  verbs::Staging outgoing_{nics_, 1, verbs::kHeaderBytes, ibv::kAccessLocalWrite};
  verbs::Staging incoming_{nics_, kNumSlots, kChunkBytes, verbs::kPeerWrites};
  verbs::Staging headers_{nics_, kNumSlots, verbs::kHeaderBytes, verbs::kPeerWrites};
  verbs::QueuePair qp_{nic_.domain, cq_, {.sends = 64, .receives = 64}, nic_.info.port, 0};
  verbs::OfferInfo theirs_{};
  verbs::NicPairInfo nic_pair_{};
};

// Our connection, with a transfer both ways.
struct Receiver {
  Receiver() {
    transfer.send.Add(operand.data(), operand.size());
    transfer.receive.Add(result.data(), result.size());
    transfer.ticket = transfer.peer_ticket = 1;
    liar.Accept(connection.Offer());
    connection.Accept(liar.Offer());
    host.Add(transfer);
    connection.Begin(transfer, {});
  }

  // An input is records: immediate data, and a header with its length before it.
  void Play(std::string_view input) {
    InputReader reader(input);
    for (int i = 0; i < 16 && !reader.empty(); ++i) {
      const auto immediate = reader.Take<uint32_t>();
      liar.Send(reader.TakeSized(), immediate);
      for (int turn = 0; turn < 4; ++turn) connection.Advance();
    }
  }

  std::vector<std::byte> operand = std::vector<std::byte>(kTransferBytes);
  std::vector<std::byte> result = std::vector<std::byte>(kTransferBytes);
  Transfer transfer;
  FuzzHost host;
  verbs::VerbsConnection connection{TheNics(), kChunkBytes, host};
  VerbsLiar liar;
};

std::string Record(const Immediate& immediate, const ChunkInfo& info) {
  return BytesOf(verbs::Pack(immediate)) + Sized(BytesOf(info));
}

// Chunk `slot` of the transfer, in its slot.
std::string Chunk(uint8_t slot, uint64_t offset) {
  const uint64_t num_bytes = std::min<uint64_t>(kChunkBytes, kTransferBytes - offset);
  return Record({ImmediateKind::kChunk, slot}, {1, offset, num_bytes, {}});
}
std::string Chunk(uint8_t slot) { return Chunk(slot, slot * kChunkBytes); }

std::vector<std::string> Seeds() {
  const std::string credit = Record({ImmediateKind::kCredit, 3}, {});
  return {Chunk(0) + Chunk(1) + Chunk(2), Chunk(2) + credit + Chunk(0) + Chunk(1),
          Chunk(0) + Chunk(0, kChunkBytes) + Chunk(0, 2 * kChunkBytes)};
}

[[maybe_unused]] const bool added = AddFuzzer(
    {.name = "verbs_chunks",
     .covers = {"xla_plugin/net/verbs/verbs_connection.cc", "xla_plugin/net/verbs/link.cc"},
     .seeds = &Seeds,
     .run = [](std::string_view input) { Receiver().Play(input); }});

TEST(FuzzVerbsTest, ChunksOfALiarArrive) {
  for (const std::string& input : Seeds()) {
    Receiver receiver;
    receiver.Play(input);
    EXPECT_EQ(receiver.transfer.received, kTransferBytes);
  }
}

// Bytes that arrive twice must not replace others that are missing.
TEST(FuzzVerbsTest, ChunkThatNicsSendTwiceIsRefused) {
  Receiver receiver;
  const std::string again = Chunk(1, /*offset=*/0);
  EXPECT_THAT(ThrownText([&] { receiver.Play(Chunk(0) + again + Chunk(2)); }),
              HasSubstr(kBytesTwice));
  EXPECT_EQ(receiver.transfer.received, kChunkBytes);
}

TEST(FuzzVerbsTest, SlotThatIsFilledTwiceIsRefused) {
  Receiver receiver;
  const std::string chunk = Chunk(0);
  for (int i = 0; i < 2; ++i) {
    InputReader reader(chunk);
    const auto immediate = reader.Take<uint32_t>();
    receiver.liar.Send(reader.TakeSized(), immediate);
  }
  EXPECT_THAT(ThrownText([&] { receiver.connection.Advance(); }),
              HasSubstr("slot 0 was filled twice"));
}

}  // namespace
}  // namespace jaxhet::testing
