#include "xla_plugin/engine/device/device_rescue.h"

#include <algorithm>
#include <thread>
#include <utility>

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
  // The program has not gone past what has not arrived by now, and will not.
  const std::deque<DeviceWatch::Failed> failed = watch_.FailAll();
  for (const auto& each : failed) remaining_.push_back({each});
  for (const auto& [source, channel] : channels_.incoming()) channel->end->Cut();
  if (!failed.empty()) copied_ = Clock::now() + kCopyTime;
  const Time limit = Clock::now() + timeout;
  std::this_thread::sleep_until(std::min(copied_, limit));
  if (copied_ > limit) return false;
  for (; !remaining_.empty(); remaining_.pop_front()) {
    Remaining& first = remaining_.front();
    const InFlight& transfer = first.failed.transfer;
    words_->go_on.host().store(first.failed.turn - 1);  // the program may start this one
    if (!RunToTheEnd(transfer, limit) || !Poison(first, limit)) return false;
    sends_.push_back(transfer.send.marks);
  }
  words_->go_on.host().store(kOpen);
  const auto is_over = [&](const Marks& sends) { return sent_.IsOver(sends); };
  if (!OpenUntil(limit, [&] { return std::ranges::all_of(sends_, is_over); })) return false;
  sends_.clear();
  return true;
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
      open({&words.intact, 1});
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
    return sent_.IsOver(sends) && (transfer.is_pending ? watch_.IsReached(transfer)
                                                       : received_.IsOver(transfer.receive.marks));
  });
}

bool DeviceRescue::Poison(Remaining& remaining, Time limit) {
  const std::span<std::byte> missing = remaining.failed.missing;
  if (missing.empty()) return true;
  auto* const stream = stream_.get();
  if (!std::exchange(remaining.is_filled, true)) {
    const std::byte poison = remaining.failed.transfer.exchange.poison;
    device_.Fill(stream, missing.data(), poison, missing.size());
  }
  while (!device_.IsIdle(stream) && Clock::now() < limit) std::this_thread::sleep_for(kPause);
  return device_.IsIdle(stream);
}

}  // namespace jaxhet
