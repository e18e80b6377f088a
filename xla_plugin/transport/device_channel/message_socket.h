#ifndef XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_MESSAGE_SOCKET_H_
#define XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_MESSAGE_SOCKET_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "xla_plugin/base/fd.h"
#include "xla_plugin/base/io_list.h"
#include "xla_plugin/transport/pollable.h"

namespace jaxhet {

// Messages over a connection, few and short. For one thread.
class MessageSocket final : public Pollable {
 public:
  // Uses a connection that another object owns as well.
  explicit MessageSocket(const Fd& socket);

  int fd() const override { return fd_.get(); }
  void OnEvents(uint32_t /*events*/) override { is_readable_ = true; }
  // Throws if the peer has not read for long: the kernel holds many messages.
  void Send(std::span<const iovec> message) const;
  // The next message, if it has arrived. Throws if the peer has closed the connection.
  std::optional<std::string> Receive();

 private:
  Fd fd_;
  bool is_readable_ = true;
  std::string received_;
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_MESSAGE_SOCKET_H_
