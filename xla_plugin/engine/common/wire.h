#ifndef XLA_PLUGIN_ENGINE_COMMON_WIRE_H_
#define XLA_PLUGIN_ENGINE_COMMON_WIRE_H_

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"
#include "xla_plugin/net/socket/socket.h"

// The structures that bodies of messages on a control connection start with.
namespace jaxhet {

// A longer listing of a program is not sent: it only makes errors clearer.
inline constexpr uint64_t kMaxProgramBytes = uint64_t{8} << 20;

// Types of messages, as numbers for a ControlChannel.
struct MessageType {
  enum Number : uint32_t {
    kHello,  // HelloInfo, then a table of strings: (transport, "ok" or "refused", offer or reason)
    kHelloReply,  // the same table, in answer to the peer's hello; the offers are empty
    kPlan,       // PlanInfo, the plan's text, then its program; before the first start of that plan
    kStart,      // StartInfo, then the bytes themselves (eager) or the transport's announcement
    kTransport,  // for the peer's Connection::OnMessage
    kHeartbeat,  // nothing
    kFail,       // FailInfo, then the text
    kGoodbye,    // nothing; no start follows
    kDeviceChannel,  // the structure of channel_setup.cc and a text
  };
};

struct HelloInfo {
  int64_t process;
};

struct PlanInfo {
  int64_t plan;
  uint64_t text_bytes;  // the rest is the program
};

// The start of one exchange by rank `source`, as told to rank `destination`.
struct StartInfo {
  uint64_t communicator;
  int64_t run;
  int64_t plan;
  int64_t index;
  int64_t sequence;
  int64_t kind;
  int32_t source;
  int32_t destination;
  uint64_t send_bytes;     // from source to destination
  uint64_t receive_bytes;  // from destination to source
  uint64_t ticket;         // names the source's transfer
  uint64_t eager;          // 1: send_bytes bytes follow
};

struct FailInfo {
  ErrorCode code;
  int32_t failed_process;
};

// Takes a T off the front of `body`.
template <typename T>
T TakeInfo(std::string_view& body) {
  return Take<T>(body, "a message");
}

// Takes that many bytes off the front of `body`.
std::string_view TakeBytes(std::string_view& body, uint64_t num_bytes);

// The error that a kFail message reports.
Error ParseFail(std::string_view body);

// A list of strings as one, each with its length before it.
std::string PackStrings(std::span<const std::string> strings);
std::vector<std::string> UnpackStrings(std::string_view body);

}  // namespace jaxhet

#endif  // XLA_PLUGIN_ENGINE_COMMON_WIRE_H_
