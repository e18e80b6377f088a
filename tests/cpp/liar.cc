#include "tests/cpp/liar.h"

#include <unistd.h>

#include <array>
#include <thread>
#include <utility>

namespace jaxhet::testing {

using ::testing::AllOf;
using ::testing::HasSubstr;

Liar::Liar(int num_processes, std::vector<std::string> transports, bool knows_ranks) {
  auto ends = ConnectAll(num_processes, 1);
  WorldOptions options = FaultOptions("socket");
  options.num_processes = num_processes;
  options.transports = std::move(transports);
  options.engine.peer_timeout_ms = kLong.count();
  for (size_t process = 1; process < ends.size(); ++process) {
    data_.push_back(std::move(ends[process][0].data[0]));
    channels_.emplace_back(std::move(ends[process][0].control));
  }
  engine_ = MakeEngine(0, options, std::move(ends[0]));
  const std::string table = PackStrings(std::array<std::string, 3>{"socket", "ok", ""});
  for (size_t i = 0; i < channels_.size(); ++i) {
    const HelloInfo info{static_cast<int64_t>(i) + 1};
    const std::array body = {ObjectIovec(info), ToIovec(table.data(), table.size())};
    channels_[i].Send(MessageType::kHello, body);
    channels_[i].Send(MessageType::kHelloReply, table);
  }
  if (knows_ranks) {
    SetUpEngine(*engine_, options);
  } else {
    engine_->Connect(kLong);
  }
}

Liar::~Liar() { engine_->Close(std::chrono::milliseconds(10)); }

void Liar::SendPlan() {
  const std::string text = PlanText(8);
  SendPlan({.plan = kPlan, .text_bytes = text.size()}, text);
}

void Liar::SendPlan(const PlanInfo& info, std::string_view texts) {
  channel().Send(MessageType::kPlan,
                 std::array{ObjectIovec(info), ToIovec(texts.data(), texts.size())});
}

void Liar::SendStart(const StartInfo& info, std::string_view tail) {
  channel().Send(MessageType::kStart,
                 std::array{ObjectIovec(info), ToIovec(tail.data(), tail.size())});
}

void Liar::SendChunk(const Chunk& chunk, std::string_view bytes) const {
  EXPECT_EQ(write(data().get(), &chunk, sizeof chunk), sizeof chunk);
  EXPECT_EQ(write(data().get(), bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
}

void Liar::AwaitStarts(uint64_t count) const {
  const auto started = [](const ProgressEngine& progress) {
    return progress.Stats().at("exchanges_started");
  };
  while (engine_->Read(started) < count) std::this_thread::yield();
}

void Liar::AwaitArrival() {
  constexpr int64_t kLast = 99;
  SendPlan({.plan = kLast, .text_bytes = 0}, "");
  const auto has_arrived = [](const ProgressEngine& progress) {
    return progress.peers().PlansOf(1).Find(kLast) != nullptr;
  };
  const Time limit = Clock::now() + kLong;
  while (!engine_->Read(has_arrived) && Clock::now() < limit) std::this_thread::yield();
}

void Liar::ExpectRefusal(std::string_view words, const Location& location) const {
  const CalledAt here(location);
  const auto error = engine_->WaitFailure(kLong);
  ASSERT_NE(error, nullptr);
  EXPECT_THAT(error->what(), AllOf(HasSubstr("jaxhet.TransportError: ["),
                                   HasSubstr("process 1 (host 1)"), HasSubstr(words)));
}

}  // namespace jaxhet::testing
