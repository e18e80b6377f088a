#include <array>
#include <bit>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tests/cpp/host_device.h"
#include "tests/cpp/liar.h"
#include "tests/cpp/testing.h"
#include "tests/cpp/world.h"

// A peer that talks nonsense while channels between devices are set up.
namespace jaxhet::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Same values and layout as in channel_setup.cc.
enum class Step : int32_t { kOffer, kAnswer, kAccepted, kProved, kRefused, kSettled };
struct ChannelStepInfo {
  Step step;
  int32_t source;
  int32_t target;
};

struct ChannelMessage {
  ChannelStepInfo info;
  std::vector<std::string> strings;
};

// Error of rank 0 after rank 1 has sent these messages, and no sound one.
std::string Refusal(std::span<const ChannelMessage> messages) {
  Liar liar(2, {"socket", "host"});
  for (const auto& [info, strings] : messages) {
    const std::string table = PackStrings(strings);
    liar.channel().Send(MessageType::kDeviceChannel,
                        std::array{ObjectIovec(info), ToIovec(table.data(), table.size())});
  }
  std::array<std::byte, 256> memory{};
  return ThrownText([&] {
    liar.engine().OpenDevices(HostVendor(), {{0, 0, memory}}, {}, std::chrono::milliseconds(5'000));
  });
}

void ExpectRefused(std::vector<ChannelMessage> messages, std::string_view words,
                   const Location& location = Location::current()) {
  const CalledAt here(location);
  EXPECT_THAT(Refusal(messages),
              AllOf(HasSubstr("jaxhet.TransportError: process 1: "), HasSubstr(words)));
}

TEST(ChannelLiarTest, RefusesChannelMessagesOutOfOrder) {
  ExpectRefused({{{Step::kAccepted, 0, 1}, {std::string(64, 'x')}}},
                "a proof of a device channel arrived out");
  ExpectRefused({{{Step::kProved, 1, 0}, {""}}},
                "the proof of a device channel arrived out of order");
  ExpectRefused({{{Step::kSettled, 0, 1}, {""}}},
                "the end of a device channel arrived out of order");
}

TEST(ChannelLiarTest, RefusesRingMessagesWithOtherNumbersOfStrings) {
  for (const auto step : {Step::kOffer, Step::kAnswer, Step::kAccepted, Step::kProved,
                          Step::kRefused, Step::kSettled}) {
    const bool is_to_target =
        step == Step::kAnswer || step == Step::kProved || step == Step::kRefused;
    const ChannelStepInfo info{step, is_to_target ? 1 : 0, is_to_target ? 0 : 1};
    ExpectRefused({{info, {}}}, "a message about a device channel has 0 strings, not ");
    ExpectRefused({{info, {"a", "b", "c"}}},
                  "a message about a device channel has 3 strings, not ");
  }
}

TEST(ChannelLiarTest, RefusesMessagesAboutChannelsOfOthers) {
  constexpr std::string_view kWords = "names a device channel that does not join its sender and us";
  ExpectRefused({{{Step::kOffer, 0, 0}, {"host", ""}}}, kWords);
  ExpectRefused({{{Step::kOffer, 1, 0}, {"host", ""}}}, kWords);
  ExpectRefused({{{Step::kSettled, 0, 5}, {""}}}, kWords);
  ExpectRefused({{{Step::kAnswer, -1, 0}, {""}}}, kWords);
}

TEST(ChannelLiarTest, RefusesUnknownStepsAndCutMessages) {
  for (const int32_t number : {6, -1}) {
    ExpectRefused({{{std::bit_cast<Step>(number), 0, 1}, {""}}},
                  "sent a message about no device channel");
  }
}

// The last transport that could be tried.
TEST(ChannelLiarTest, ProofThatNeverArrivesIsNamed) {
  const std::vector<ChannelMessage> messages = {{{Step::kAnswer, 1, 0}, {""}},
                                                {{Step::kProved, 1, 0}, {""}}};
  const std::string text = Refusal(messages);
  EXPECT_THAT(text, HasSubstr("no transport leads from rank 1 of process 1"));
  EXPECT_THAT(text, HasSubstr("; host: what the source's device wrote did not arrive"));
}

}  // namespace
}  // namespace jaxhet::testing
