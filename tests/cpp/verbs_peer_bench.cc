#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tests/cpp/world.h"
#include "xla_plugin/base/error.h"
#include "xla_plugin/transport/verbs/nics.h"
#include "xla_plugin/transport/verbs/verbs.h"

// verbs_peer_bench BYTES TIMES CHUNK_BYTES [FD]: messages to and fro over a verbs connection
// without an engine; every byte is checked. Without FD between two processes of it, and half of the
// median round trip is printed. With FD it is the end that answers; whoever asks has the other end
// of that socket (tests/rdma_vm/pyverbs_peer.py). On the socket go the offers, each after its size
// (uint64_t), and empty messages where both ends wait for each other.
namespace jaxhet::testing {
namespace {

struct Settings {
  size_t num_bytes;
  uint64_t times;
  size_t chunk_bytes;
};

void WriteMessage(int fd, std::string_view text) {
  const uint64_t size = text.size();
  std::string message(reinterpret_cast<const char*>(&size), sizeof size);
  message += text;
  const auto sent = send(fd, message.data(), message.size(), MSG_NOSIGNAL);
  if (std::cmp_not_equal(sent, message.size())) ThrowErrno("send");
}

std::string ReadMessage(int fd) {
  uint64_t size = 0;
  if (recv(fd, &size, sizeof size, MSG_WAITALL) != sizeof size) ThrowErrno("recv");
  std::string text(size, '\0');
  if (size > 0 && std::cmp_not_equal(recv(fd, text.data(), size, MSG_WAITALL), size)) {
    ThrowErrno("recv");
  }
  return text;
}

// Message `number`; the same for both ends.
std::vector<std::byte> Content(uint64_t number, size_t num_bytes) {
  return Pattern(static_cast<int>(number), 0, num_bytes);
}

// One end. Message `number` is transfer `number`.
class End final : public ConnectionHost {
 public:
  End(int control, const Settings& settings)
      : control_(control),
        connection_(OpenVerbs({.same_host = true,
                               .chunk_bytes = settings.chunk_bytes,
                               .path_timeout = {},
                               .control_fd = -1,
                               .page = nullptr,
                               .nics = &nics_,
                               .data_fds = nullptr,
                               .data_keys = nullptr,
                               .encryption = Encryption::kOff},
                              *this)),
        num_bytes_(settings.num_bytes) {}

  // Message `number` will come, after our next one.
  void Expect(uint64_t number) {
    Message& message = messages_[number];
    message.bytes.resize(num_bytes_);
    message.transfer.receive.Add(message.bytes.data(), num_bytes_);
    Begin(number);
  }
  // Message `number` will go.
  void Prepare(uint64_t number) {
    Message& message = messages_[number];
    message.bytes = Content(number, num_bytes_);
    message.transfer.send.Add(message.bytes.data(), num_bytes_);
  }
  void SendMessage(uint64_t number) {
    Begin(number);
    Finish(number);
  }
  // Until it has come.
  void Await(uint64_t number) { Finish(number); }
  // Until nothing is left to do: the peer knows then of all slots that we have emptied.
  void Settle() {
    while (connection_->Advance()) {
    }
  }
  // Checks the received and the sent bytes.
  void Check(uint64_t number) {
    if (messages_.at(number).bytes != Content(number, num_bytes_)) {
      Throw(ErrorCode::kTransport, "message ", number, " has other bytes than were sent");
    }
    messages_.erase(number);
  }

  void Connect() {
    WriteMessage(control_, connection_->Offer());
    connection_->Accept(ReadMessage(control_));
    Meet();
    connection_->Accepted();
  }
  // Returns when both ends are here.
  void Meet() const {
    WriteMessage(control_, {});
    if (!ReadMessage(control_).empty()) Throw(ErrorCode::kTransport, "an unexpected message");
  }

  void Send(std::span<const iovec> /*message*/) override {
    Throw(ErrorCode::kTransport, "a queue pair failed");
  }
  Transfer& Find(uint64_t ticket) override { return messages_.at(ticket).transfer; }
  void Sent(Transfer& transfer, size_t num_bytes) override { transfer.sent += num_bytes; }
  void Received(Transfer& transfer, size_t num_bytes) override { transfer.received += num_bytes; }
  void Log(std::string_view what) override { LogLine(what); }
  void Lost(std::string_view why) override { Throw(ErrorCode::kTransport, why); }

 private:
  struct Message {
    Transfer transfer;
    std::vector<std::byte> bytes;
  };

  void Begin(uint64_t number) {
    Transfer& transfer = messages_.at(number).transfer;
    transfer.ticket = transfer.peer_ticket = number;
    connection_->Begin(transfer, {});
  }
  void Finish(uint64_t number) {
    const Transfer& transfer = messages_.at(number).transfer;
    Time deadline = Time::max();  // the clock costs time
    for (uint32_t i = 1; !transfer.IsDone(); ++i) {
      connection_->Advance();
      if (i == 1024) deadline = Clock::now() + kLong;
      if (i % 1024 != 0 || Clock::now() <= deadline) continue;
      Throw(ErrorCode::kDeadline, "message ", number, " is late");
    }
  }

  int control_;
  verbs::Nics nics_{NicOptions()};
  std::unique_ptr<Connection> connection_;
  size_t num_bytes_;
  std::map<uint64_t, Message> messages_;
};

// Even messages come to us, odd ones go back.
void Answer(int control, const Settings& settings) {
  End end(control, settings);
  end.Connect();
  end.Expect(0);
  end.Meet();
  for (uint64_t number = 0; number < 2 * settings.times; number += 2) {
    end.Prepare(number + 1);
    end.Await(number);
    end.SendMessage(number + 1);
    end.Check(number);
    end.Check(number + 1);
    end.Expect(number + 2);
  }
  end.Settle();
  end.Meet();
}

void Ask(int control, const Settings& settings) {
  End end(control, settings);
  end.Connect();
  end.Meet();
  std::vector<double> times_us;
  for (uint64_t number = 0; number < 2 * settings.times; number += 2) {
    end.Prepare(number);
    end.Expect(number + 1);
    const Time begin = Clock::now();
    end.SendMessage(number);
    end.Await(number + 1);
    const std::chrono::duration<double, std::micro> time = Clock::now() - begin;
    times_us.push_back(time.count() / 2);
    end.Check(number);
    end.Check(number + 1);
  }
  end.Meet();
  std::ranges::sort(times_us);
  std::printf("verbs %zu bytes  p50 %.2f us  p99 %.2f us\n", settings.num_bytes,
              times_us[times_us.size() / 2], times_us[times_us.size() * 99 / 100]);
}

void Main(const Settings& settings) {
  std::array<int, 2> ends{};
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()) != 0) ThrowErrno("socketpair");
  const pid_t pid = fork();
  if (pid == 0) {
    Answer(ends[1], settings);
    _exit(0);
  }
  Ask(ends[0], settings);
  int status = 0;
  waitpid(pid, &status, 0);
  if (status != 0) Throw(ErrorCode::kTransport, "the other end failed");
}

}  // namespace
}  // namespace jaxhet::testing

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  try {
    const jaxhet::testing::Settings settings{.num_bytes = std::stoul(arguments.at(0)),
                                             .times = std::stoul(arguments.at(1)),
                                             .chunk_bytes = std::stoul(arguments.at(2))};
    if (arguments.size() == 3) {
      jaxhet::testing::Main(settings);
    } else {
      jaxhet::testing::Answer(std::stoi(arguments.at(3)), settings);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
