#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/cpp/fuzz.h"
#include "tests/cpp/testing.h"
#include "xla_plugin/transport/shared_memory.h"
#include "xla_plugin/transport/shm/shm_pull.h"
#include "xla_plugin/transport/shm/shm_ring.h"
#include "xla_plugin/transport/verbs/connection.h"
#include "xla_plugin/transport/verbs/wire.h"

// Offers and messages of the transports between processes. tcp's chunks are in fuzz_messages_test.
namespace jaxhet::testing {
namespace {

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

TransportSetup SetupWith(const SharedPage& page, verbs::Nics& nics) {
  return {.same_host = true,
          .chunk_bytes = kChunkBytes,
          .page = &page,
          .nics = &nics,
          .data_fds = nullptr,
          .data_keys = nullptr,
          .encryption = Encryption::kOff};
}

// State that our end and a sound peer of this process share; lives as long as the process.
struct Peer {
  SharedPage page;
  verbs::Nics nics{{.devices = {}, .qps = 1, .depth = 2}};
  FuzzHost host;

  std::unique_ptr<Connection> Open(std::string_view transport, ConnectionHost& its_host) {
    for (const Transport& entry : Transports()) {
      if (entry.name == transport) return entry.open(SetupWith(page, nics), its_host);
    }
    Throw(ErrorCode::kUsage, "no transport ", transport);
  }
};

Peer& ThePeer() {
  static auto* const peer = new Peer;
  return *peer;
}

// The peer's end of a connection; its offer holds as long as the process.
Connection& PeerEnd(std::string_view transport) {
  static auto* const ends = new std::map<std::string, std::unique_ptr<Connection>>;
  auto& end = (*ends)[std::string(transport)];
  if (!end) end = ThePeer().Open(transport, ThePeer().host);
  return *end;
}

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
void Play(std::string_view transport, std::string_view input) {
  InputReader reader(input);
  FuzzHost host;
  OwnTransfer own;
  const auto connection = ThePeer().Open(transport, host);
  (void)connection->Offer();
  connection->Accept(reader.TakeSized());
  connection->Accepted();
  host.Add(own.transfer);
  (void)connection->Announce(own.transfer);
  const std::string_view announcement = reader.TakeSized();
  // Nobody is there to receive what RDMA would send.
  if (transport != "verbs") connection->Begin(own.transfer, announcement);
  for (int messages = 0; messages < 64 && !host.is_lost(); ++messages) {
    for (int i = 0; i < 4; ++i) connection->Advance();
    if (reader.empty()) break;
    const std::string_view message = reader.TakeSized();
    connection->OnMessage(std::as_bytes(std::span(message)));
  }
}

// --- shm: pulls out of the peer's memory ---

struct SegmentInfo {
  uint64_t address;
  uint64_t num_bytes;
};

std::vector<std::string> PullSeeds() {
  static auto* const theirs = new std::vector<std::byte>(kTransferBytes);
  const auto address = reinterpret_cast<uint64_t>(theirs->data());
  const std::string offer = PeerEnd("shm").Offer();
  const std::string whole = BytesOf(SegmentInfo{address, kTransferBytes});
  const std::string halves =
      BytesOf(SegmentInfo{address + 5'000, 5'000}) + BytesOf(SegmentInfo{address, 5'000});
  const std::string receipt = BytesOf(uint64_t{1});
  return {Script().Add(offer).Add(whole).Add(receipt).text,
          Script().Add(offer).Add(halves).Add("").Add(receipt).text};
}

[[maybe_unused]] const bool added_pull =
    AddFuzzer({.name = "shm",
               .covers = {"xla_plugin/transport/pull.cc", "xla_plugin/transport/shm/shm_pull.cc",
                          "xla_plugin/transport/shared_memory.cc"},
               .seeds = &PullSeeds,
               .run = [](std::string_view input) { Play("shm", input); }});

// --- shm_ring: slots in shared memory ---

struct SlotInfo {
  uint32_t state;  // 0: filled, 1: freed
  uint32_t slot;
  uint64_t ticket;
  uint64_t offset;
  uint64_t num_bytes;
};

std::vector<std::string> SlotSeeds() {
  const std::string offer = PeerEnd("shm_ring").Offer();
  Script script;
  script.Add(offer).Add("");
  uint32_t slot = 0;
  for (size_t offset = 0; offset < kTransferBytes; offset += kChunkBytes, ++slot) {
    const size_t num_bytes = std::min(kChunkBytes, kTransferBytes - offset);
    script.Add(BytesOf(SlotInfo{0, slot, 1, offset, num_bytes}));
    script.Add(BytesOf(SlotInfo{1, 7 - slot, 0, 0, 0}));
  }
  return {script.text, Script().Add(offer).Add("").Add(BytesOf(SlotInfo{1, 7, 0, 0, 0})).text};
}

[[maybe_unused]] const bool added_slots = AddFuzzer(
    {.name = "shm_ring",
     .covers = {"xla_plugin/transport/shm/shm_ring.cc", "xla_plugin/transport/shared_memory.cc"},
     .seeds = &SlotSeeds,
     .run = [](std::string_view input) { Play("shm_ring", input); }});

// --- verbs: offers, and what becomes of paths ---

std::vector<std::string> VerbsSeeds() {
  const std::string offer = PeerEnd("verbs").Offer();
  const verbs::PathEventInfo closed{verbs::PathEvent::kClosed, 0, 0, {17, 1}};
  const verbs::PathEventInfo dead{verbs::PathEvent::kClosed, 1, 0, {0, 0}};
  const verbs::PathEventInfo opened{verbs::PathEvent::kOpened, 0, 1, {}};
  const auto num_slots = InputReader(offer).Take<verbs::OfferInfo>().num_slots;
  const std::string sequences(num_slots * sizeof(verbs::SlotSequences), '\0');
  const auto close = [&](const verbs::PathEventInfo& info) {
    return BytesOf(info) + sequences + "the cable";
  };
  return {Script().Add(offer).Add("").Add(close(closed)).Add(BytesOf(opened)).text,
          Script().Add(offer).Add("").Add(close(dead)).Add(close(closed)).text};
}

[[maybe_unused]] const bool added_verbs =
    AddFuzzer({.name = "verbs",
               .covers = {"xla_plugin/transport/verbs/slot_link_paths.cc"},
               .seeds = &VerbsSeeds,
               .run = [](std::string_view input) { Play("verbs", input); }});

}  // namespace
}  // namespace jaxhet::testing
