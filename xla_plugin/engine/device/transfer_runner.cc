#include "xla_plugin/engine/device/transfer_runner.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <thread>
#include <utility>

#include "xla_plugin/base/error.h"

namespace jaxhet {
namespace {

constexpr std::chrono::microseconds kIdlePause{50};  // between looks at the streams

}  // namespace

// Chunks take turns on our streams. Without streams of ours they all use the program's stream,
// which the caller flushes.
class TransferRunner::Works {
 public:
  Works(Device& device, Streams& streams, const Marks& marks, StreamWork* program,
        EventHandle ready)
      : marks_(marks), program_(program) {
    if (!IsByStreams(marks)) return;
    ours_.reserve(kStreams);
    for (size_t s = 0; s < kStreams; ++s) {
      ours_.emplace_back(device, streams.at(s).get());
      if (marks.at(s) != 0) ours_.back().WaitEvent(ready);
    }
  }

  StreamWork& For(const Chunk& chunk) {
    return ours_.empty() ? *program_ : ours_[chunk.number % kStreams];
  }
  template <typename Function>
  void ForEachMarked(Function function) {
    ForEachStream(marks_,
                  [&](size_t s) { function(s, s == kProgramStream ? *program_ : ours_[s]); });
  }
  void Flush() {
    for (StreamWork& work : ours_) work.Flush();
  }

 private:
  const Marks& marks_;
  StreamWork* program_;
  std::vector<StreamWork> ours_;
};

TransferRunner::TransferRunner(Device& device, const StreamProgress& sent,
                               const StreamProgress& received)
    : device_(device), sent_(sent), received_(received) {
  for (Stream& stream : send_streams_) stream = device.CreateStream(StreamPriority::kHigh);
  for (Stream& stream : receive_streams_) stream = device.CreateStream(StreamPriority::kHigh);
  announce_stream_ = device.CreateStream(StreamPriority::kHigh);
  done_stream_ = device.CreateStream(StreamPriority::kHigh);
}

Event TransferRunner::Record(StreamHandle stream) {
  Event event;
  if (events_.empty()) {
    event = device_.CreateEvent();
  } else {
    event = std::move(events_.back());
    events_.pop_back();
  }
  device_.Record(event.get(), stream);
  return event;
}

void TransferRunner::Recycle(Event event) {
  if (event.get() != nullptr) events_.push_back(std::move(event));
}

StreamWork TransferRunner::Announcement(EventHandle ready) {
  StreamWork work(device_, announce_stream_.get());
  work.WaitEvent(ready);
  return work;
}

void TransferRunner::Follow(StreamHandle program) {
  Event over = Record(done_stream_.get());
  device_.WaitEvent(program, over.get());
  Recycle(std::move(over));
}

void TransferRunner::OfferOperand(const InFlight& transfer, RankChannel& channel,
                                  StreamWork& announcement) {
  const size_t num_bytes = transfer.transfer.operand.size();
  channel.num_bytes += num_bytes;
  offered_bytes_ += num_bytes;
  const DeviceChannel& end = *channel.end;
  announcement.Write(end.AddressOf(end.words().ready), DeviceNumber(transfer.send.number));
}

void TransferRunner::Send(const InFlight& transfer, RankChannel& channel, StreamWork* program,
                          EventHandle ready) {
  const DeviceChannel& end = *channel.end;
  ChannelWords& words = end.words();
  const std::span<const std::byte> operand = transfer.transfer.operand;
  const Marks& marks = transfer.send.marks;
  Works works(device_, send_streams_, marks, program, ready);
  channel.num_bytes += operand.size();
  ForEachChunk(operand.size(), end.slot_bytes(), channel.chunks, [&](const Chunk& chunk) {
    StreamWork& work = works.For(chunk);
    if (!channel.IsFree(chunk.number))
      work.Wait(end.AddressOf(words.head.at(chunk.slot())), chunk.generation() - 1);
    ++channel.chunks;
    work.Copy(end.slot(chunk.slot()), operand.data() + chunk.begin, chunk.num_bytes);
    work.Write(end.AddressOf(words.tail.at(chunk.slot())), chunk.generation());
  });
  works.ForEachMarked(
      [&](size_t s, StreamWork& work) { work.Write(sent_.AddressOf(s), marks.at(s)); });
  works.Flush();
}

void TransferRunner::Receive(const InFlight& transfer, RankChannel& channel, StreamWork* program,
                             EventHandle ready) {
  const DeviceChannel& end = *channel.end;
  ChannelWords& words = end.words();
  const std::span<std::byte> result = transfer.transfer.result;
  const Marks& marks = transfer.receive.marks;
  Works works(device_, receive_streams_, marks, program, ready);
  channel.num_bytes += result.size();
  ForEachChunk(result.size(), end.slot_bytes(), transfer.receive.route.first_chunk,
               [&](const Chunk& chunk) {
                 StreamWork& work = works.For(chunk);
                 work.Wait(end.AddressOf(words.tail.at(chunk.slot())), chunk.generation());
                 work.Copy(result.data() + chunk.begin, end.slot(chunk.slot()), chunk.num_bytes);
                 work.Write(end.AddressOf(words.head.at(chunk.slot())), chunk.generation());
               });
  works.ForEachMarked([&](size_t s, StreamWork& work) {
    work.Wait(end.AddressOf(words.intact), kOpen);
    work.Write(received_.AddressOf(s), marks.at(s));
  });
  works.Flush();
}

void TransferRunner::Get(const InFlight& transfer, RankChannel& channel, EventHandle ready) {
  const DeviceChannel& end = *channel.end;
  ChannelWords& words = end.words();
  const std::span<std::byte> result = transfer.transfer.result;
  const uint64_t number = transfer.receive.number;
  const auto* const operand = end.At(end.source_log().PlaceOf(number), result.size());
  const size_t s = number % kStreams;
  StreamWork work(device_, receive_streams_.at(s).get());
  work.WaitEvent(ready);
  work.Wait(end.AddressOf(words.ready), DeviceNumber(number));
  ForEachPart(transfer.transfer, [&](const TransferPart& part) {
    work.Copy(result.data() + part.begin, operand + part.begin, part.num_bytes);
    work.Wait(end.AddressOf(words.intact), kOpen);
    if (part.num_left == 0) work.Write(end.AddressOf(words.TakenOf(number)), DeviceNumber(number));
    work.Write(received_.AddressOf(s), transfer.receive.marks.at(s) - part.num_left);
  });
  work.Flush();
  channel.num_bytes += result.size();
  read_bytes_ += result.size();
}

bool TransferRunner::IsIdle() {
  const auto is_idle = [&](const Stream& stream) { return device_.IsIdle(stream.get()); };
  return std::ranges::all_of(send_streams_, is_idle) &&
         std::ranges::all_of(receive_streams_, is_idle) && is_idle(announce_stream_) &&
         is_idle(done_stream_);
}

bool TransferRunner::IsIdleWithin(std::chrono::milliseconds timeout) {
  const Time limit = Clock::now() + timeout;
  while (!IsIdle()) {
    if (Clock::now() >= limit) return false;
    std::this_thread::sleep_for(kIdlePause);
  }
  return true;
}

void TransferRunner::DropStreams() {
  for (Stream& stream : send_streams_) stream = {};
  for (Stream& stream : receive_streams_) stream = {};
  announce_stream_ = {};
  done_stream_ = {};
}

}  // namespace jaxhet
