#include <array>
#include <cstring>
#include <deque>
#include <thread>

#include "tests/cpp/testing.h"
#include "tests/cpp/world.h"
#include "xla_plugin/base/error.h"
#include "xla_plugin/transport/transport.h"

// The steps of CONTRIBUTING, "Add a transport": a connection, a function that opens it, and a row
// of the table.
namespace jaxhet {
namespace {

// Bytes travel as messages of the control connection: the receiver's ticket, then what is sent.
class PigeonConnection final : public Connection {
 public:
  explicit PigeonConnection(ConnectionHost& host) : host_(host) {}

  void Begin(Transfer& transfer, std::string_view /*announcement*/) override {
    if (transfer.sent < transfer.send.num_bytes()) sends_.push_back(&transfer);
  }
  void OnMessage(std::span<const std::byte> message) override {
    uint64_t ticket = 0;
    if (message.size() < sizeof ticket) Throw(ErrorCode::kTransport, "a pigeon's letter is cut");
    std::memcpy(&ticket, message.data(), sizeof ticket);
    Transfer& transfer = host_.Find(ticket);
    const auto bytes = message.subspan(sizeof ticket);
    transfer.Reserve(0, bytes.size());
    transfer.receive.CopyIn(0, bytes);
    host_.Received(transfer, bytes.size());
  }
  bool Advance() override {
    for (; !sends_.empty(); sends_.pop_front()) {
      Transfer& transfer = *sends_.front();
      std::vector<iovec> message = {ObjectIovec(transfer.peer_ticket)};
      for (const iovec& entry : transfer.send.entries()) message.push_back(entry);
      host_.Send(message);
      host_.Sent(transfer, transfer.send.num_bytes());
    }
    return false;
  }

 private:
  ConnectionHost& host_;
  std::deque<Transfer*> sends_;
};

std::unique_ptr<Connection> OpenPigeons(TransportSetup& setup, ConnectionHost& host) {
  if (!setup.same_host) Throw(ErrorCode::kTransport, "pigeons don't leave their host");
  return std::make_unique<PigeonConnection>(host);
}

}  // namespace

// In the place of xla_plugin/transport/table.cc, which the linker then leaves out.
std::span<const Transport> Transports() {
  static constexpr std::array kTable = {Transport{"pigeons", &OpenPigeons}};
  return kTable;
}

namespace testing {
namespace {

TEST(NewTransportTest, MovesTheBytesOfExchanges) {
  const WorldOptions options{.transports = {"pigeons"}};
  World world(options);
  const auto eager = static_cast<size_t>(options.engine.eager_bytes);
  int64_t run_id = 0;
  for (const size_t num_bytes : {size_t{0}, eager, eager + 1, size_t{1'000'003}}) {
    for (const auto& error : GatherBoth(world, num_bytes, ++run_id)) EXPECT_FALSE(error);
  }
  const auto stats =
      world.engine(0).Read([](const ProgressEngine& progress) { return progress.Stats(); });
  EXPECT_EQ(stats.at("bytes_sent_pigeons"), 2 * eager + 1 + 1'000'003);
}

TEST(NewTransportTest, SaysWhyItCanNotBeUsed) {
  const WorldOptions options{.transports = {"pigeons"}};
  auto ends = ConnectAll(2);
  std::deque<Engine> engines;
  for (const size_t process : {0U, 1U}) {
    const int own = static_cast<int>(process);
    PeerSpec peer = SpecOf(1 - own, options, std::move(ends[process][1 - process]));
    peer.same_host = false;
    engines.emplace_back(own, 2, options.engine).AddPeer(std::move(peer));
  }
  std::thread other([&] { EXPECT_THROW(engines[1].Connect(kLong), Error); });
  EXPECT_THAT(ThrownText([&] { engines[0].Connect(kLong); }),
              ::testing::HasSubstr("pigeons: pigeons don't leave their host"));
  other.join();
}

}  // namespace
}  // namespace testing
}  // namespace jaxhet
