#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cpp/fuzz.h"
#include "tests/cpp/testing.h"
#include "tests/cpp/world.h"
#include "xla_plugin/base/error.h"
#include "xla_plugin/net/socket/socket.h"
#include "xla_plugin/net/socket/socket_connection.h"
#include "xla_plugin/net/verbs/verbs_connection.h"
#include "xla_plugin/net/verbs/wire.h"
#include "xla_plugin/transport/process_vm/process_vm.h"

// Offers and messages of the transports between processes.
namespace jaxhet::testing {
namespace {

using ::testing::HasSubstr;

constexpr size_t kChunkBytes = 4'096;
constexpr size_t kTransferBytes = 10'000;

// A transfer of our rank with the peer's, both ways, and its memory.
struct OwnTransfer {
  OwnTransfer() {
    transfer.send.Add(operand.data(), operand.size());
    transfer.receive.Add(result.data(), result.size());
    transfer.ticket = 1;
    transfer.peer_ticket = 1;
  }

  std::vector<std::byte> operand = std::vector<std::byte>(kTransferBytes);
  std::vector<std::byte> result = std::vector<std::byte>(kTransferBytes);
  Transfer transfer;
};

// State that our end and a sound peer of this process share; lives as long as the process.
struct Peer {
  MemoryState state;
  verbs::Nics nics{NicOptions(/*depth=*/2)};
  FuzzHost host;

  std::unique_ptr<Connection> Open(ConnectionHost& its_host) const {
    const TransportSetup setup{.same_host = true,
                               .memory_state = &state,
                               .nics = nullptr,
                               .encryption = Encryption::kOff,
                               .sockets = {}};
    return OpenProcessVm(setup, its_host);
  }
};

Peer& ThePeer() {
  static auto* const peer = new Peer;
  return *peer;
}

// --- process_vm: pulls out of the peer's memory ---

// An input is an offer and then messages, each with a Begin() or an Advance() after it.
struct Script {
  std::string text;

  Script& Add(std::string_view sized) {
    text += Sized(sized);
    return *this;
  }
};

// Our connection accepts the input's offer and hears its messages. Of these, the first is the
// announcement of the peer's start.
void Pull(std::string_view input) {
  InputReader reader(input);
  FuzzHost host;
  OwnTransfer own;
  const auto connection = ThePeer().Open(host);
  (void)connection->Offer();
  connection->Accept(reader.TakeSized());
  host.Add(own.transfer);
  (void)connection->Announce(own.transfer);
  const std::string_view announcement = reader.TakeSized();
  connection->Begin(own.transfer, announcement);
  for (int messages = 0; messages < 64 && !host.is_lost(); ++messages) {
    for (int i = 0; i < 4; ++i) connection->Advance();
    if (reader.empty()) break;
    const std::string_view message = reader.TakeSized();
    connection->OnMessage(std::as_bytes(std::span(message)));
  }
}

struct SegmentInfo {
  uint64_t address;
  uint64_t num_bytes;
};

std::vector<std::string> PullSeeds() {
  static auto* const theirs = new std::vector<std::byte>(kTransferBytes);
  const auto address = reinterpret_cast<uint64_t>(theirs->data());
  static auto* const end =
      ThePeer().Open(ThePeer().host).release();  // valid as long as the process
  const std::string offer = end->Offer();
  const std::string whole = BytesOf(SegmentInfo{address, kTransferBytes});
  const std::string halves =
      BytesOf(SegmentInfo{address + 5'000, 5'000}) + BytesOf(SegmentInfo{address, 5'000});
  const std::string receipt = BytesOf(uint64_t{1});
  return {Script().Add(offer).Add(whole).Add(receipt).text,
          Script().Add(offer).Add(halves).Add("").Add(receipt).text};
}

[[maybe_unused]] const bool added_pull =
    AddFuzzer({.name = "process_vm",
               .covers = {"xla_plugin/transport/process_vm/process_vm.cc"},
               .seeds = &PullSeeds,
               .run = &Pull});

// --- socket: two data sockets, each of a path of its own ---

// Both ends of a connection over the loopback, whose ports are free again once it has ended.
std::pair<Fd, Fd> PairOf(size_t path) {
  auto pair = ConnectedPair(path);
  const linger at_once{.l_onoff = 1, .l_linger = 0};
  for (const Fd* end : {&pair.first, &pair.second}) {
    if (setsockopt(end->get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once) != 0) {
      ThrowErrno("setsockopt(SO_LINGER)");
    }
  }
  return pair;
}

// After the offer, an input says in turns: which data socket, or 2 for a message; and the bytes.
void PlaySocket(std::string_view input) {
  InputReader reader(input);
  FuzzHost host;
  OwnTransfer own;
  std::vector<Fd> data;
  std::vector<Fd> theirs;
  for (const size_t path : {0U, 1U}) {
    auto [first, second] = PairOf(path);
    data.push_back(std::move(first));
    theirs.push_back(std::move(second));
  }
  const auto connection = sockets::OpenSockets({.control_fd = -1,
                                                .data = std::move(data),
                                                .keys = std::vector<SealKeys>(2),
                                                .chunk_bytes = kChunkBytes,
                                                .path_timeout = std::chrono::seconds(1)},
                                               host);
  EXPECT_FALSE(connection->Offer().empty());
  connection->Accept(reader.TakeSized());
  host.Add(own.transfer);
  connection->Begin(own.transfer, {});
  while (!host.is_lost()) {
    for (int i = 0; i < 4; ++i) connection->Advance();
    if (reader.empty()) break;
    const size_t place = reader.Take<uint8_t>() % 3;
    const std::string_view bytes = reader.TakeSized();
    if (place == 2) {
      connection->OnMessage(std::as_bytes(std::span(bytes)));
    } else {
      WriteSome(theirs[place], bytes);
      for (Pollable* const pollable : connection->Pollables()) pollable->OnEvents(EPOLLIN);
    }
  }
}

std::string DataOf(uint8_t socket, size_t offset, size_t num_bytes, size_t num_sent) {
  const sockets::ChunkInfo info{sockets::kChunkMagic, 0, 1, offset, num_bytes};
  return BytesOf(socket) + Sized(BytesOf(info) + std::string(num_sent, 'x'));
}

std::string EventOf(sockets::SocketEvent event, uint32_t socket, uint64_t num_chunks) {
  return BytesOf(uint8_t{2}) + Sized(BytesOf(sockets::SocketEventInfo{event, socket, num_chunks}));
}

// Our three chunks are sent over socket 0, 1 and 0, or as the sockets can take them.
std::vector<std::string> SocketSeeds() {
  using sockets::SocketEvent;
  const std::string offer = Sized(BytesOf(sockets::OfferInfo{sockets::kOfferMagic, 2}));
  const std::string whole = DataOf(0, 0, 4'000, 4'000) + DataOf(1, 4'000, 6'000, 6'000);
  const std::string confirmed =
      EventOf(SocketEvent::kReceived, 0, 1) + EventOf(SocketEvent::kReceived, 1, 1);
  // The peer leaves a socket in the middle of a chunk, and sends that again over the other one.
  const std::string left = DataOf(0, 0, 4'000, 17) + EventOf(SocketEvent::kLeft, 0, 1);
  return {offer + whole + confirmed, offer + left + DataOf(1, 0, 4'000, 4'000) + confirmed,
          offer + left + EventOf(SocketEvent::kLeft, 1, 0),
          offer + EventOf(SocketEvent::kReceived, 0, 7)};
}

[[maybe_unused]] const bool added_socket = AddFuzzer(
    {.name = "socket",
     .covers = {"xla_plugin/net/socket/socket_connection.cc", "xla_plugin/net/connection.h"},
     .seeds = &SocketSeeds,
     .run = &PlaySocket});

// The second socket takes a chunk and can't send it: the third chunk is for the first one.
TEST(FuzzTransportsTest, SocketWhoseBufferIsFullHoldsUpOnlyItsOwnChunk) {
  FuzzHost host;
  OwnTransfer own;
  auto [first, theirs] = ConnectedPair(0);
  auto [full, unread] = ConnectedPair(1);
  for (int i = 0; i < 20; ++i) {
    WriteSome(full, std::string(size_t{16} << 20, 'x'));
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  sockets::SocketSetup setup{.control_fd = -1,
                             .data = {},
                             .keys = std::vector<SealKeys>(2),
                             .chunk_bytes = kChunkBytes,
                             .path_timeout = std::chrono::seconds(1)};
  setup.data.push_back(std::move(first));
  setup.data.push_back(std::move(full));
  const auto connection = sockets::OpenSockets(std::move(setup), host);
  connection->Accept(connection->Offer());
  connection->Begin(own.transfer, {});
  while (connection->Advance()) {
  }
  int num_bytes = 0;
  EXPECT_EQ(ioctl(theirs.get(), FIONREAD, &num_bytes), 0);
  EXPECT_EQ(static_cast<size_t>(num_bytes),
            2 * sizeof(sockets::ChunkInfo) + kTransferBytes - kChunkBytes);
}

// Statements of a peer about data sockets that can't be true.
TEST(FuzzTransportsTest, FalseWordsAboutDataSocketsAreRefused) {
  using sockets::SocketEvent;
  const std::string offer = Sized(BytesOf(sockets::OfferInfo{sockets::kOfferMagic, 2}));
  const auto refusal = [](const std::string& input) {
    return ThrownText([&] { PlaySocket(input); });
  };
  EXPECT_THAT(refusal(Sized("JXP")), HasSubstr("the peer's offer is cut"));
  EXPECT_THAT(refusal(Sized(BytesOf(sockets::OfferInfo{sockets::kOfferMagic, 3}))),
              HasSubstr("the peer's offer is not of this version of jaxhet"));
  EXPECT_THAT(refusal(offer + EventOf(SocketEvent::kReceived, 0, 7)),
              HasSubstr("it confirms 7 chunks of a data socket, but 2 were sent"));
  EXPECT_THAT(refusal(offer + EventOf(SocketEvent::kReceived, 2, 0)),
              HasSubstr("no data socket 2"));
  const std::string unknown = BytesOf(uint32_t{9}) + BytesOf(uint32_t{0}) + BytesOf(uint64_t{0});
  EXPECT_THAT(refusal(offer + BytesOf(uint8_t{2}) + Sized(unknown)), HasSubstr("is called 9"));
  EXPECT_THAT(
      refusal(offer + EventOf(SocketEvent::kLeft, 0, 0) + EventOf(SocketEvent::kReceived, 0, 1)),
      HasSubstr("it had left that data socket before"));
  EXPECT_THAT(refusal(offer + DataOf(0, 0, 4'000, 4'000) + DataOf(1, 3'999, 10, 10)),
              HasSubstr("it sent bytes of a transfer twice"));
  EXPECT_THAT(refusal(Sized("") + EventOf(SocketEvent::kReceived, 0, 0)),
              HasSubstr("a socket connection of one path has no messages"));
}

// --- verbs: headers and immediate data that a peer's NIC writes ---

using verbs::Immediate;
using verbs::ImmediateKind;

constexpr size_t kNumSlots = 4;

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
    for (int i = 0; i < 64; ++i) PostReceive();
    qp_.Connect(nic_.info, ThePeer().nics.options(), nic_pair_);
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

  std::vector<std::shared_ptr<verbs::Nic>> nics_{ThePeer().nics.Usable().front()};
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
struct Receiver : OwnTransfer {
  Receiver() {
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

  FuzzHost host;
  verbs::VerbsConnection connection{ThePeer().nics, kChunkBytes, host};
  VerbsLiar liar;
};

std::string Record(const Immediate& immediate, const verbs::ChunkInfo& info) {
  return BytesOf(verbs::Pack(immediate)) + Sized(BytesOf(info));
}

// Chunk `slot` of the transfer, in its slot.
std::string Chunk(uint8_t slot, uint64_t offset) {
  const uint64_t num_bytes = std::min<uint64_t>(kChunkBytes, kTransferBytes - offset);
  return Record({ImmediateKind::kChunk, slot}, {1, offset, num_bytes, {}});
}
std::string Chunk(uint8_t slot) { return Chunk(slot, slot * kChunkBytes); }

std::vector<std::string> ChunkSeeds() {
  const std::string credit = Record({ImmediateKind::kCredit, 3}, {});
  return {Chunk(0) + Chunk(1) + Chunk(2), Chunk(2) + credit + Chunk(0) + Chunk(1),
          Chunk(0) + Chunk(0, kChunkBytes) + Chunk(0, 2 * kChunkBytes)};
}

[[maybe_unused]] const bool added_chunks =
    AddFuzzer({.name = "verbs_chunks",
               .covers = {"xla_plugin/net/verbs/verbs_connection.cc"},
               .seeds = &ChunkSeeds,
               .run = [](std::string_view input) { Receiver().Play(input); }});

TEST(FuzzVerbsTest, ChunksOfALiarArrive) {
  for (const std::string& input : ChunkSeeds()) {
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
