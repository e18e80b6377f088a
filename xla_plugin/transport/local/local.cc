#include "xla_plugin/transport/local/local.h"

#include "xla_plugin/transport/pull.h"

namespace jaxhet {
namespace {

class LocalConnection final : public PullConnection {
 public:
  using PullConnection::PullConnection;

 private:
  size_t Copy(std::span<const iovec> to, std::span<const iovec> from) override {
    return CopyEntries(to, from);
  }
  bool SourceIsAlive() override { return true; }
};

}  // namespace

std::unique_ptr<Connection> OpenLocal(ConnectionHost& host) {
  return std::make_unique<LocalConnection>(host);
}

}  // namespace jaxhet
