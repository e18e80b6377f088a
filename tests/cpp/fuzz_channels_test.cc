#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cpp/device_world.h"
#include "tests/cpp/fuzz.h"
#include "tests/cpp/host_device.h"
#include "tests/cpp/testing.h"
#include "tests/cpp/world.h"
#include "xla_plugin/base/error.h"
#include "xla_plugin/engine/device/channel_setup.h"
#include "xla_plugin/net/socket/socket.h"
#include "xla_plugin/net/socket/socket_connection.h"
#include "xla_plugin/net/verbs/nics.h"
#include "xla_plugin/transport/device_channel/device_channel.h"
#include "xla_plugin/transport/device_channel/lane.h"
#include "xla_plugin/transport/device_channel/lane_channel.h"
#include "xla_plugin/transport/device_channel/shared_memory.h"

// Offers, answers and messages of channels between devices.
namespace jaxhet::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr size_t kSlotBytes = 4'096;

// One end's side of two ranks on this host: its device, operands, and sockets to the other end.
struct End {
  End(Fd its_data, Fd its_messages, SealKeys keys) : data(dup(its_data.get())) {
    sockets::SocketSetup setup{.control_fd = its_messages.get(),
                               .data = {},
                               .keys = {},
                               .chunk_bytes = sockets::kWholeTransfers,
                               .path_timeout = std::chrono::seconds(1)};
    setup.data.push_back(std::move(its_data));
    setup.keys.push_back(std::move(keys));
    lane = std::make_shared<Lane>(
        Lane::Messages{std::move(its_messages), {}}, [](std::string_view /*what*/) {},
        [&setup](ConnectionHost& host) { return sockets::OpenSockets(std::move(setup), host); });
  }

  ChannelSetup Setup() {
    return {.device = *device,
            .same_process = false,
            .same_host = true,
            .same_vendor = true,
            .slot_bytes = kSlotBytes,
            .pull_bytes = 1'000,
            .operands = {static_cast<std::byte*>(memory.get()), kProofBytes},
            .lanes = {&lane, 1},
            .nics = &nics};
  }

  std::unique_ptr<Device> device = OpenHostDevice();
  DeviceMemory memory = device->Allocate(kSlotBytes);
  Fd data;  // one more descriptor of the lane's data socket
  std::shared_ptr<Lane> lane;
  verbs::Nics nics{NicOptions(/*depth=*/2)};
};

struct Ends {
  explicit Ends(SealKeys own_keys = {}) {
    auto [own_data, peer_data] = UnixPair();
    auto [own_messages, peer_messages] = UnixPair();
    own = std::make_unique<End>(std::move(own_data), std::move(own_messages), std::move(own_keys));
    peer = std::make_unique<End>(std::move(peer_data), std::move(peer_messages), SealKeys{});
  }

  std::unique_ptr<End> own;
  std::unique_ptr<End> peer;
};

// Channels that a sound target has made, with their offers. They live as long as the process.
struct Offered {
  std::string transport;
  std::unique_ptr<DeviceChannel> end;
  std::string offer;
};

const std::vector<Offered>& AllOffered() {
  static const auto* const all = [] {
    static auto* const ends = new Ends;
    auto* const offered = new std::vector<Offered>;
    for (const std::string_view name : {"host", "verbs", "socket"}) {
      auto [end, offer] = DeviceTransportOf(name).make(ends->peer->Setup());
      offered->push_back({std::string(name), std::move(end), std::move(offer)});
    }
    return offered;
  }();
  return *all;
}

// --- offers, by the source ---

std::vector<std::string> OfferSeeds() {
  std::vector<std::string> seeds;
  for (const auto& [transport, end, offer] : AllOffered()) {
    seeds.push_back(Sized(transport).append(offer));
    seeds.push_back(Sized(transport == "host" ? "local" : "cuda_ipc").append(offer));
  }
  return seeds;
}

void OpenOffer(std::string_view input) {
  InputReader reader(input);
  const std::string_view name = reader.TakeSized();
  const std::string_view offer = reader.TakeBytes(input.size());
  Ends ends;
  const auto channel = DeviceTransportOf(name).open(ends.own->Setup(), offer);
  (void)channel->Answer();
  (void)channel->Remark();
}

[[maybe_unused]] const bool added_offers =
    AddFuzzer({.name = "channel_offers",
               .covers = {"xla_plugin/transport/device_channel/device_channel.cc",
                          "xla_plugin/transport/device_channel/lane_channel.cc",
                          "xla_plugin/transport/device_channel/shared_channels.cc",
                          "xla_plugin/transport/device_channel/shared_memory.cc",
                          "xla_plugin/transport/device_channel/lane_channel.h",
                          "xla_plugin/net/verbs/verbs_connection.cc"},
               .seeds = &OfferSeeds,
               .run = &OpenOffer});

// --- answers, by the target ---

// Same layout as in shared_channels.cc.
struct OperandMemoryInfo {
  uint64_t num_bytes;
  uint64_t proof_place;
  uint64_t pull_bytes;
  uint64_t by_handle;
  IpcHandleInfo handle;
};

std::vector<std::string> AnswerSeeds() {
  std::vector<std::string> seeds;
  for (const uint64_t by_handle : {0U, 1U}) {
    const OperandMemoryInfo info{kSlotBytes, 0, 1'000, by_handle, {}};
    seeds.push_back(Sized("host").append(BytesOf(info)));
  }
  for (const auto& [transport, end, offer] : AllOffered()) {
    static auto* const ends = new Ends;
    const auto source = DeviceTransportOf(transport).open(ends->own->Setup(), offer);
    seeds.push_back(Sized(transport).append(source->Answer()));
  }
  return seeds;
}

void AcceptAnswer(std::string_view input) {
  InputReader reader(input);
  const std::string_view name = reader.TakeSized();
  const std::string_view answer = reader.TakeBytes(input.size());
  Ends ends;
  const DeviceTransport& transport = DeviceTransportOf(name);
  const auto [channel, offer] = transport.make(ends.own->Setup());
  const auto source = name == "host" ? transport.open(ends.peer->Setup(), offer) : nullptr;
  channel->Accept(answer);
  if (name == "verbs") return;  // it would wait for the proof
  const std::array<std::byte, kProofBytes> proof{};
  (void)channel->IsProven(*ends.own->device, proof);
}

[[maybe_unused]] const bool added_answers =
    AddFuzzer({.name = "channel_answers",
               .covers = {"xla_plugin/transport/device_channel/shared_channels.cc",
                          "xla_plugin/transport/device_channel/shared_memory.cc"},
               .seeds = &AnswerSeeds,
               .run = &AcceptAnswer});

// --- the set-up as a whole ---

// Same layout as in channel_setup.cc.
struct ChannelStepInfo {
  int32_t step;
  int32_t source;
  int32_t target;
  int32_t transport;
};

constexpr int32_t kHost = 3;  // places in DeviceTransports()
constexpr int32_t kSocket = 5;

std::string SetUpStep(const ChannelStepInfo& info, std::string_view text = {}) {
  return Sized(BytesOf(info).append(text));
}

std::vector<std::string> SetUpSeeds() {
  const auto& [transport, end, offer] = AllOffered().front();
  const std::string proof(kProofBytes, 'p');
  const std::string good =
      SetUpStep({0, 0, 1, kHost}, offer) + SetUpStep({1, 1, 0, 0}, std::string(96, '\0')) +
      SetUpStep({2, 0, 1, 0}, proof) + SetUpStep({3, 1, 0, 0}) + SetUpStep({5, 0, 1, 0});
  const std::string refused = SetUpStep({4, 1, 0, 0}, "no") + SetUpStep({4, 1, 0, 0}, "no") + good;
  const std::string as_source =
      SetUpStep({0, 0, 1, kHost}, offer) + SetUpStep({2, 0, 1, 0}, proof) + SetUpStep({5, 0, 1, 0});
  return {good,
          refused,
          as_source,
          SetUpStep({1, 1, 0, 0}, std::string(96, '\xff')),
          SetUpStep({9, 0, 1, 0}),
          SetUpStep({0, 0, 1, 9}, offer),
          SetUpStep({0, 0, 1, kSocket}, BytesOf(uint64_t{kSlotBytes})) + good};
}

// A job whose messages about channels are the input. It fails when all were looked at.
class ScriptedJob final : public QuietJob {
 public:
  explicit ScriptedJob(std::string_view input) : reader_(input) {}

  std::shared_ptr<const Error> failure() const override {
    return is_over_ ? std::make_shared<const Error>(ErrorCode::kPeer, "the end") : nullptr;
  }
  std::vector<ChannelMessage> TakeChannelMessages(
      const std::function<bool(const ChannelMessage&)>& /*want*/) override {
    is_over_ = reader_.empty();
    std::vector<ChannelMessage> messages;
    for (int i = 0; i < 32 && !reader_.empty(); ++i) {
      messages.push_back({1, std::string(reader_.TakeSized())});
    }
    return messages;
  }

 private:
  InputReader reader_;
  bool is_over_ = false;
};

void SetUpWith(std::string_view input, const std::vector<std::string>& allowed) {
  const auto peer_of = [&](int rank) {
    return ChannelPeer{.rank = rank,
                       .process = rank,
                       .name = StrCat("rank ", rank),
                       .vendor = "host",
                       .same_process = rank == 0,
                       .same_host = true,
                       .allowed = allowed};
  };
  const std::array peers = {peer_of(0), peer_of(1)};
  std::vector<std::unique_ptr<DeviceRank>> ranks;
  ranks.push_back(std::make_unique<DeviceRank>(0, OpenHostDevice(), 0));
  ScriptedJob job(input);
  verbs::Nics nics(NicOptions());
  Options engine = EngineOptions();
  engine.slot_bytes = kSlotBytes;
  const ChannelOptions options{.engine = engine, .operands = {}, .nics = &nics};
  SetUpChannels(peers, ranks, std::array{ChannelPair{0, 1}}, {}, options, job,
                Clock::now() + std::chrono::seconds(5));
}

void SetUpByScript(std::string_view input) { SetUpWith(input, {"host", "socket"}); }

TEST(FuzzChannelsTest, WrongMessagesOfASetUpAreRefused) {
  constexpr std::string_view kOther = "names a device channel that does not join its sender and us";
  struct Row {
    ChannelStepInfo info;
    std::string text;
    std::string_view words;
  };
  const std::vector<Row> rows = {
      {{2, 0, 1, 0}, std::string(64, 'x'), "a proof of a device channel arrived out"},
      {{3, 1, 0, 0}, "", "the proof of a device channel arrived out of order"},
      {{5, 0, 1, 0}, "", "the end of a device channel arrived out of order"},
      {{0, 0, 0, kHost}, "", kOther},
      {{0, 1, 0, kHost}, "", kOther},
      {{5, 0, 5, 0}, "", kOther},
      {{1, -1, 0, 0}, "", kOther},
      {{6, 0, 1, 0}, "", "sent a message about no device channel"},
      {{-1, 0, 1, 0}, "", "sent a message about no device channel"}};
  for (const auto& [info, text, words] : rows) {
    const std::string input = SetUpStep(info, text);
    EXPECT_THAT(ThrownText([&] { SetUpByScript(input); }),
                AllOf(HasSubstr("jaxhet.TransportError: process 1: "), HasSubstr(words)));
  }
}

// The last transport that could be tried.
TEST(FuzzChannelsTest, ProofThatNeverArrivesIsNamed) {
  const std::string input = SetUpStep({1, 1, 0, 0}) + SetUpStep({3, 1, 0, 0});
  EXPECT_THAT(ThrownText([&] { SetUpWith(input, {"host"}); }),
              AllOf(HasSubstr("no transport leads from rank 1"),
                    HasSubstr("; host: what the source's device wrote did not arrive")));
}

[[maybe_unused]] const bool added_set_up =
    AddFuzzer({.name = "channel_setup",
               .covers = {"xla_plugin/engine/device/channel_setup.cc"},
               .seeds = &SetUpSeeds,
               .run = &SetUpByScript});

// --- descriptors left in a mailbox ---

// Sends the mailbox some copies of a descriptor, which the kernel may drop. False if it fails.
bool Post(const FdMailboxInfo& mailbox, size_t num_fds, const Fd& fd) {
  sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
  const size_t size = strnlen(mailbox.name.data(), mailbox.name.size());
  std::memcpy(&address.sun_path[1], mailbox.name.data(), size);
  iovec body = ObjectIovec(mailbox.nonce);
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(4 * sizeof(int))> beside{};
  msghdr message{};
  message.msg_name = &address;
  message.msg_namelen = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + size);
  message.msg_iov = &body;
  message.msg_iovlen = 1;
  message.msg_control = beside.data();
  message.msg_controllen = CMSG_SPACE(num_fds * sizeof(int));
  cmsghdr* const header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(num_fds * sizeof(int));
  for (size_t i = 0; i < num_fds; ++i) {
    const int number = fd.get();
    std::memcpy(CMSG_DATA(header) + i * sizeof number, &number, sizeof number);
  }
  const Fd socket(::socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  return sendmsg(socket.get(), &message, MSG_NOSIGNAL) >= 0;
}

struct Pipe {
  Pipe() {
    std::array<int, 2> ends{};
    EXPECT_EQ(pipe2(ends.data(), O_CLOEXEC), 0);
    read = Fd(ends[0]);
    write = Fd(ends[1]);
  }
  // Whether no process holds a descriptor of the writing end.
  bool HasEnded() const {
    pollfd polled{.fd = read.get(), .events = POLLIN, .revents = 0};
    return poll(&polled, 1, 0) == 1 && (polled.revents & POLLHUP) != 0;
  }
  Fd read;
  Fd write;
};

// Strangers of the same host find a mailbox's name in /proc/net/unix.
FdMailboxInfo Guess(FdMailboxInfo mailbox) {
  mailbox.nonce = {1, 2};
  return mailbox;
}

TEST(FuzzChannelsTest, StrangersDoNotFillTheQueueOfAMailbox) {
  FdMailbox mailbox;
  const Pipe theirs;
  for (int i = 0; i < 5'000; ++i) EXPECT_TRUE(Post(Guess(mailbox.info()), 1, theirs.write));
  Pipe own;
  LeaveFd(mailbox.info(), own.write);
  own.write.Reset();
  EXPECT_FALSE(own.HasEnded());
  mailbox.Take();  // closes it
  EXPECT_TRUE(own.HasEnded());
}

TEST(FuzzChannelsTest, DescriptorsThatAMailboxDoesNotTakeAreNotKept) {
  FdMailbox mailbox;
  Pipe pipe;
  for (size_t count = 0; count <= 4; ++count) {
    EXPECT_TRUE(Post(Guess(mailbox.info()), count, pipe.write));
    if (count != 1) {
      EXPECT_TRUE(Post(mailbox.info(), count, pipe.write));
    }
  }
  pipe.write.Reset();
  EXPECT_THAT(ThrownText([&] { mailbox.Take(); }), HasSubstr("no file descriptor from the peer"));
  EXPECT_TRUE(pipe.HasEnded());
}

// --- descriptions of chunks: on sockets, or in the headers that NICs write ---

std::vector<std::string> ChunkSeeds() {
  std::string two;
  for (uint64_t i = 0; i < 2; ++i) {
    two +=
        BytesOf(sockets::ChunkInfo{sockets::kChunkMagic, 0, i, 0, sizeof(DeviceChunkInfo) + 100});
    two += BytesOf(DeviceChunkInfo{i + 1, 7, 0, 100, i, 100}) + std::string(100, 'A');
  }
  const auto one = [](const DeviceChunkInfo& info) {
    return BytesOf(sockets::ChunkInfo{sockets::kChunkMagic, 0, 0, 0, sizeof info}) + BytesOf(info);
  };
  return {two, one({1, 7, 0, 0, 0, 0}), one({1, 7, 0, 100, uint64_t{1} << 63, 100}),
          one({1, 7, 0, UINT64_MAX, 0, kSlotBytes + 1})};
}

// Keys of one connection, at either end.
SealKeys KeysFor(Encryption encryption) {
  const auto key = [] { return SealKey::FromHex(std::string(2 * SealKey::kNumBytes, '7')); };
  return {.encryption = encryption, .send = key(), .receive = key()};
}

std::vector<std::string> SealedChunkSeeds() {
  std::vector<std::string> seeds = ChunkSeeds();
  for (std::string& seed : seeds) {
    auto [own, peer] = UnixPair();
    Socket socket(std::move(own), KeysFor(Encryption::kFull));
    const iovec entry = ToIovec(seed.data(), seed.size());
    EXPECT_EQ(socket.Write({&entry, 1}), seed.size());
    std::string sealed(2 * kMostSealedBytes, '\0');
    const ssize_t count = recv(peer.get(), sealed.data(), sealed.size(), MSG_DONTWAIT);
    seed = sealed.substr(0, static_cast<size_t>(std::max<ssize_t>(count, 0)));
  }
  return seeds;
}

void CarryChunks(std::string_view input, Encryption encryption) {
  Ends ends(encryption == Encryption::kOff ? SealKeys{} : KeysFor(encryption));
  const auto [channel, offer] = DeviceTransportOf("socket").make(ends.own->Setup());
  (void)send(ends.peer->data.get(), input.data(), input.size(), MSG_NOSIGNAL);
  shutdown(ends.peer->data.get(), SHUT_WR);
  Proxy proxy;
  channel->Settle(proxy);
  // The input ends, or its chunk waits for a slot that is never emptied.
  for (int i = 0; i < 20 && channel->Failure().empty(); ++i) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

TEST(FuzzChannelsTest, ChunkOutOfTurnOrTooLongIsRefused) {
  const auto parse = [](DeviceChunkInfo info, uint64_t chunk) {
    std::array<std::byte, sizeof info> bytes{};
    std::memcpy(bytes.data(), &info, sizeof info);
    return ParseDeviceChunkInfo(bytes, chunk, kSlotBytes).num_bytes;
  };
  EXPECT_EQ(parse({1, 7, 0, 100, 9, 100}, 9), 100U);
  EXPECT_THAT(ThrownText([&] { parse({1, 7, 0, 100, 17, 100}, 9); }),
              HasSubstr("chunk 17 in the place of chunk 9"));
  EXPECT_THAT(ThrownText([&] { parse({1, 7, 0, 100, 9, 101}, 9); }), HasSubstr("its exchange 100"));
  EXPECT_THAT(ThrownText([&] { parse({1, 7, 0, 1U << 30, 9, kSlotBytes + 1}, 9); }),
              HasSubstr("its slot holds"));
}

[[maybe_unused]] const bool added_chunks =
    AddFuzzer({.name = "channel_chunks",
               .covers = {"xla_plugin/transport/device_channel/lane_channel.cc"},
               .seeds = &ChunkSeeds,
               .run = [](std::string_view input) { CarryChunks(input, Encryption::kOff); }});

[[maybe_unused]] const bool added_sealed_chunks = AddFuzzer(
    {.name = "sealed_channel_chunks",
     .covers = {"xla_plugin/transport/device_channel/lane_channel.cc", "xla_plugin/net/seal.cc"},
     .seeds = &SealedChunkSeeds,
     .run = [](std::string_view input) { CarryChunks(input, Encryption::kFull); }});

}  // namespace
}  // namespace jaxhet::testing
