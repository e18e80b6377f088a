#include <algorithm>

#include "xla_plugin/engine/device_rank.h"

// Copies on streams that move the bytes of a rank's exchanges, and the words around them.
namespace jaxhet {

// Chunks take turns on our streams, or are all for the program's, which is left to the caller to
// flush.
class DeviceRank::Works {
 public:
  Works(Device& device, std::array<Stream, kStreams>& streams, const Marks& marks,
        StreamWork* program, EventHandle ready)
      : marks_(marks), program_(program) {
    if (!IsByStreams(marks)) return;
    ours_.reserve(kStreams);
    for (size_t s = 0; s < kStreams; ++s) {
      ours_.emplace_back(device, streams.at(s).get());
      if (marks.at(s) != 0) ours_.back().WaitEvent(ready);
    }
  }

  StreamWork& For(uint64_t chunk) { return ours_.empty() ? *program_ : ours_[chunk % kStreams]; }
  template <typename Function>
  void ForEachMarked(Function function) {
    ForEachStream(marks_, [&](size_t s) { function(s, s == kProgram ? *program_ : ours_[s]); });
  }
  void Flush() {
    for (StreamWork& work : ours_) work.Flush();
  }

 private:
  const Marks& marks_;
  StreamWork* program_;
  std::vector<StreamWork> ours_;
};

void DeviceRank::Send(const InFlight& exchange, StreamWork* program, EventHandle ready) {
  RankChannel& channel = *outgoing_.at(exchange.target);
  const DeviceChannel& end = *channel.end;
  std::span<const std::byte> operand = exchange.operand;
  const size_t chunk_bytes = ChunkBytes(operand.size(), end.slot_bytes());
  Works works(*device_, send_streams_, exchange.sends, program, ready);
  channel.num_bytes += operand.size();
  do {
    const auto chunk = operand.first(std::min(chunk_bytes, operand.size()));
    operand = operand.subspan(chunk.size());
    StreamWork& work = works.For(channel.chunks);
    const uint32_t slot = SlotOf(channel.chunks);
    const uint32_t generation = GenerationOf(channel.chunks);
    if (!IsFree(channel, channel.chunks)) work.Wait(end.head(slot), generation - 1);
    ++channel.chunks;
    work.Copy(end.slot(slot), chunk.data(), chunk.size());
    work.Write(end.tail(slot), generation);
  } while (!operand.empty());
  works.ForEachMarked([&](size_t s, StreamWork& work) {
    work.Write(AddressOf(words_->sent.at(s)), exchange.sends.at(s));
  });
  works.Flush();
}

void DeviceRank::Receive(const InFlight& exchange, uint64_t first_chunk, StreamWork* program,
                         EventHandle ready) {
  RankChannel& channel = *incoming_.at(exchange.source);
  const DeviceChannel& end = *channel.end;
  std::span<std::byte> result = exchange.result;
  const size_t chunk_bytes = ChunkBytes(result.size(), end.slot_bytes());
  Works works(*device_, receive_streams_, exchange.receives, program, ready);
  channel.num_bytes += result.size();
  uint64_t number = first_chunk;
  do {
    const auto chunk = result.first(std::min(chunk_bytes, result.size()));
    result = result.subspan(chunk.size());
    StreamWork& work = works.For(number);
    const uint32_t slot = SlotOf(number);
    const uint32_t generation = GenerationOf(number++);
    work.Wait(end.tail(slot), generation);
    work.Copy(chunk.data(), end.slot(slot), chunk.size());
    work.Write(end.head(slot), generation);
  } while (!result.empty());
  works.ForEachMarked([&](size_t s, StreamWork& work) {
    work.Wait(end.abort_flag(), kOpen);
    work.Write(AddressOf(words_->received.at(s)), exchange.receives.at(s));
  });
  works.Flush();
}

void DeviceRank::Pull(const InFlight& exchange, EventHandle ready) {
  RankChannel& channel = *incoming_.at(exchange.source);
  const DeviceChannel& end = *channel.end;
  const std::span<std::byte> result = exchange.result;
  const uint64_t number = exchange.incoming_number;
  const auto* const operand = end.At(end.words().source.PlaceOf(number), result.size());
  const size_t s = number % kStreams;
  StreamWork work(*device_, receive_streams_.at(s).get());
  work.WaitEvent(ready);
  work.Wait(end.ready(), DeviceNumber(number));
  size_t begin = 0;
  for (uint32_t left = exchange.parts; left > 0; --left) {
    const size_t num_bytes = left > 1 ? exchange.part_bytes : result.size() - begin;
    work.Copy(result.data() + begin, operand + begin, num_bytes);
    begin += num_bytes;
    work.Wait(end.abort_flag(), kOpen);
    if (left == 1) work.Write(end.taken(number), DeviceNumber(number));
    work.Write(AddressOf(words_->received.at(s)), exchange.receives.at(s) - (left - 1));
  }
  work.Flush();
  channel.num_bytes += result.size();
  pulled_bytes_ += result.size();
}

void DeviceRank::CopyOwn(const InFlight& exchange, EventHandle ready) {
  const size_t s = exchange.incoming_number % kStreams;
  StreamWork work(*device_, receive_streams_.at(s).get());
  work.WaitEvent(ready);
  work.Copy(exchange.result.data(), exchange.operand.data(), exchange.result.size());
  work.Write(AddressOf(words_->received.at(s)), exchange.receives.at(s));
  work.Flush();
}

// By the program's stream; another one than the first program's leaves it to one of ours.
void DeviceRank::AwaitTaken(const InFlight& exchange, StreamWork& program) {
  const uint64_t number = exchange.outgoing_number;
  void* const taken = outgoing_.at(exchange.target)->end->taken(number);
  if (IsByProgram(exchange.sends)) {
    program.Wait(taken, DeviceNumber(number));
    return;
  }
  const size_t s = number % kStreams;
  StreamWork ours(*device_, send_streams_.at(s).get());
  ours.Wait(taken, DeviceNumber(number));
  ours.Write(AddressOf(words_->sent.at(s)), exchange.sends.at(s));
  ours.Flush();
}

}  // namespace jaxhet
