#include "xla_plugin/engine/device_rescue.h"

#include <algorithm>
#include <deque>
#include <thread>
#include <vector>

namespace jaxhet {
namespace {

using std::chrono::milliseconds;

constexpr std::chrono::microseconds kPause{50};  // between looks at the device
constexpr milliseconds kCopyTime{100};           // for a copy of one chunk that has begun

}  // namespace

void DeviceRescue::Stop() {
  if (stopped_.exchange(true)) return;
  watch_.Stop();
  words_->go_on.host().store(0);
  for (const auto& [target, channel] : channels_.outgoing()) channel->end->Cut();
}

bool DeviceRescue::Abandon(milliseconds timeout) {
  const Time limit = Clock::now() + timeout;
  // The program has not gone past what has not arrived by now, and will not.
  const std::deque<DeviceWatch::Failed> failed = watch_.FailAll();
  std::vector<std::span<std::byte>> missing;
  for (const auto& [transfer, turn] : failed) missing.push_back(view_.MissingOf(transfer));
  for (const auto& [source, channel] : channels_.incoming()) channel->end->Cut();
  std::this_thread::sleep_for(kCopyTime);  // targets finish the copies under way
  bool is_over = true;
  for (size_t i = 0; i < failed.size() && is_over; ++i) {
    words_->go_on.host().store(failed[i].turn - 1);  // the program may start this one
    is_over =
        RunToTheEnd(failed[i].transfer, limit) && Poison(failed[i].transfer, missing[i], limit);
  }
  if (!is_over) return false;
  words_->go_on.host().store(kOpen);
  return OpenUntil(limit, [&] {
    return std::ranges::all_of(
        failed, [&](const auto& each) { return sent_.IsOver(each.transfer.send.marks); });
  });
}

// Opens all that streams may wait for. The peers may write the same words.
bool DeviceRescue::OpenUntil(Time limit, const std::function<bool()>& is_over) {
  const auto open = [](std::span<DeviceWord> words) {
    for (DeviceWord& word : words) word.host().store(kOpen);
  };
  while (true) {
    for (const auto& [target, channel] : channels_.outgoing()) {
      open(channel->end->words().head);
      open(channel->end->words().taken);
    }
    for (const auto& [source, channel] : channels_.incoming()) {
      ChannelWords& words = channel->end->words();
      open(words.tail);
      open({&words.ready, 1});
      open({&words.abort_flag, 1});
    }
    if (is_over()) return true;
    if (Clock::now() >= limit) return false;
    std::this_thread::sleep_for(kPause);
  }
}

// Until our streams have done their part of the exchange, and the program has come to its start:
// before, the memory of its result is something else's.
bool DeviceRescue::RunToTheEnd(const InFlight& transfer, Time limit) {
  Marks sends = transfer.send.marks;
  sends.at(kDoneStream) = 0;  // which waits for `go_on` first
  return OpenUntil(limit, [&] {
    return sent_.IsOver(sends) && (transfer.is_pending ? view_.IsReached(transfer)
                                                       : received_.IsOver(transfer.receive.marks));
  });
}

bool DeviceRescue::Poison(const InFlight& transfer, std::span<std::byte> missing, Time limit) {
  if (missing.empty()) return true;
  auto* const stream = stream_.get();
  device_.Fill(stream, missing.data(), transfer.exchange.poison, missing.size());
  while (!device_.IsIdle(stream) && Clock::now() < limit) std::this_thread::sleep_for(kPause);
  return device_.IsIdle(stream);
}

}  // namespace jaxhet
