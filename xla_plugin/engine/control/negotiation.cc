#include <poll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <map>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/engine/common/messages.h"
#include "xla_plugin/engine/control/peer_table.h"

namespace jaxhet {
namespace {

// A transport that may be used with one peer; refused if `connection` is null.
struct Candidate {
  std::string name;
  std::unique_ptr<Connection> connection;
  std::string text;  // our offer, or the reason of the refusal

  void Refuse(std::string reason) {
    connection.reset();
    text = std::move(reason);
  }
};

using Candidates = std::vector<Candidate>;

Candidates OpenCandidates(Introduction& introduction) {
  Candidates candidates;
  if (introduction.allowed.empty()) return candidates;
  for (const Transport& transport : Transports()) {
    Candidate candidate{.name = std::string(transport.name), .connection = {}, .text = {}};
    try {
      if (std::ranges::find(introduction.allowed, transport.name) == introduction.allowed.end()) {
        Throw(ErrorCode::kTransport, "not allowed by the options");
      }
      const auto refused = introduction.refused.find(candidate.name);
      if (refused != introduction.refused.end()) Throw(ErrorCode::kTransport, refused->second);
      candidate.connection = transport.open(introduction.setup, *introduction.peer);
      candidate.text = candidate.connection->Offer();
    } catch (const Error& error) {
      candidate.Refuse(std::string(error.text()));
    }
    candidates.push_back(std::move(candidate));
  }
  return candidates;
}

std::string Pack(const Candidates& candidates) {
  std::vector<std::string> table;
  for (const Candidate& candidate : candidates) {
    table.push_back(candidate.name);
    table.emplace_back(candidate.connection ? "ok" : "refused");
    table.push_back(candidate.text);
  }
  return PackStrings(table);
}

// Takes the peer's refusals over, and its offers if `accept`.
void Apply(std::string_view body, bool accept, Candidates& candidates) {
  const std::vector<std::string> table = UnpackStrings(body);
  if (table.size() % 3 != 0) {
    Throw(ErrorCode::kTransport, "its table of transports has ", table.size(), " entries");
  }
  for (Candidate& candidate : candidates) {
    if (!candidate.connection) continue;
    size_t i = 0;
    while (i < table.size() && table[i] != candidate.name) i += 3;
    if (i == table.size()) {
      candidate.Refuse("the peer does not know it");
    } else if (table[i + 1] != "ok") {
      candidate.Refuse("the peer: " + table[i + 2]);
    } else if (accept) {
      try {
        candidate.connection->Accept(table[i + 2]);
        candidate.text.clear();
      } catch (const Error& error) {
        candidate.Refuse(std::string(error.text()));
      }
    }
  }
}

void WaitReadable(Socket& socket, Time deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
  pollfd polled{.fd = socket.fd(), .events = POLLIN, .revents = 0};
  const int ready = left.count() > 0 ? poll(&polled, 1, CheckedCast<int>(left.count())) : 0;
  if (ready < 0 && errno != EINTR) ThrowErrno("poll");
  if (ready == 0) {
    Throw(ErrorCode::kDeadline, "it has not answered the introduction in time");
  }
  socket.OnEvents(static_cast<uint32_t>(polled.revents));
}

std::string Await(Peer& peer, uint32_t type, Time deadline) {
  while (true) {
    if (const auto message = peer.channel.Next()) {
      if (message->type == MessageType::kFail) throw ParseFail(message->body);
      if (message->type != type) Throw(ErrorCode::kTransport, "it skipped the introduction");
      return std::string(message->body);
    }
    Socket& socket = *peer.channel.socket();
    if (socket.closed()) {
      Throw(ErrorCode::kPeer, "it left during the introduction: ", socket.close_reason());
    }
    WaitReadable(socket, deadline);
  }
}

// Throws the peer's failure, if it has failed or left meanwhile: its memory is gone then.
void CheckIsThere(Peer& peer) {
  Socket& socket = *peer.channel.socket();
  socket.OnEvents(POLLIN);
  const auto message = peer.channel.Next();
  if (message && message->type == MessageType::kFail) throw ParseFail(message->body);
  if (socket.closed()) {
    Throw(ErrorCode::kPeer, "it left during the introduction: ", socket.close_reason());
  }
}

void Choose(Peer& peer, Candidates& candidates) {
  for (Candidate& candidate : candidates) {
    if (!candidate.connection) {
      peer.counts.refusals.push_back({candidate.name, candidate.text});
    } else if (!peer.connection) {
      peer.counts.transport = candidate.name;
      peer.connection = std::move(candidate.connection);
    }
  }
  if (peer.connection || candidates.empty()) return;
  CheckIsThere(peer);
  std::string reasons;
  for (const Refusal& refusal : peer.counts.refusals) {
    reasons += StrCat("; ", refusal.transport, ": ", refusal.reason);
  }
  Throw(ErrorCode::kTransport, "no transport reaches it", reasons);
}

void SendHello(int own_process, Peer& peer, const Candidates& candidates) {
  const HelloInfo info{own_process};
  const std::string table = Pack(candidates);
  peer.channel.Send(MessageType::kHello,
                    std::array{ObjectIovec(info), ToIovec(table.data(), table.size())});
}

void AnswerHello(Peer& peer, Candidates& candidates, Time deadline) {
  const std::string hello = Await(peer, MessageType::kHello, deadline);
  std::string_view body = hello;
  const auto info = TakeInfo<HelloInfo>(body);
  if (info.process != peer.process) {
    Throw(ErrorCode::kTransport, "it says that it is process ", info.process);
  }
  Apply(body, /*accept=*/true, candidates);
  peer.channel.Send(MessageType::kHelloReply, Pack(candidates));
}

void Conclude(Peer& peer, Candidates& candidates, Time deadline) {
  Apply(Await(peer, MessageType::kHelloReply, deadline), /*accept=*/false, candidates);
  Choose(peer, candidates);
}

template <typename Step>
void ForEach(std::span<Introduction> introductions, Step step) {
  for (Introduction& introduction : introductions) {
    AttributeTo(
        introduction.peer->process, [&] { return introduction.error_prefix; },
        [&] { step(introduction); });
  }
}

}  // namespace

void Negotiate(int own_process, std::span<Introduction> introductions, Time deadline) {
  std::map<const Peer*, Candidates> candidates;
  try {
    ForEach(introductions, [&](Introduction& introduction) {
      candidates[introduction.peer] = OpenCandidates(introduction);
      SendHello(own_process, *introduction.peer, candidates[introduction.peer]);
    });
    ForEach(introductions, [&](Introduction& introduction) {
      AnswerHello(*introduction.peer, candidates[introduction.peer], deadline);
    });
    ForEach(introductions, [&](Introduction& introduction) {
      Conclude(*introduction.peer, candidates[introduction.peer], deadline);
    });
  } catch (const Error& error) {
    for (const Introduction& introduction : introductions) {
      introduction.peer->SayFailure(error, own_process);
    }
    throw;
  }
}

}  // namespace jaxhet
