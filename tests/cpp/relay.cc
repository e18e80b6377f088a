#include "tests/cpp/relay.h"

#include <sys/socket.h>
#include <unistd.h>

#include <utility>

namespace jaxhet::testing {

Relay::Relay(Fd first, Fd second) : ends_{std::move(first), std::move(second)} {
  for (const size_t from : {0U, 1U}) {
    threads_.at(from) = std::thread([this, from] { PassOn(ends_.at(from), ends_.at(1 - from)); });
  }
}

Relay::~Relay() {
  for (const Fd& end : ends_) shutdown(end.get(), SHUT_RDWR);
  for (std::thread& thread : threads_) thread.join();
}

void Relay::Arm(Attack attack, size_t place) {
  const std::lock_guard lock(mutex_);
  place_ = place;
  attack_ = attack;
}

void Relay::PassOn(const Fd& from, const Fd& to) {
  std::array<char, 4096> buffer{};
  while (true) {
    const ssize_t num_bytes = read(from.get(), buffer.data(), buffer.size());
    if (num_bytes <= 0) break;
    const std::string bytes = Changed({buffer.data(), static_cast<size_t>(num_bytes)});
    for (size_t done = 0; done < bytes.size();) {
      const ssize_t sent = send(to.get(), bytes.data() + done, bytes.size() - done, MSG_NOSIGNAL);
      if (sent <= 0) break;
      done += static_cast<size_t>(sent);
    }
  }
  shutdown(to.get(), SHUT_WR);
}

std::string Relay::Changed(std::string bytes) {
  const std::lock_guard lock(mutex_);
  const size_t place = place_ % bytes.size();
  switch (std::exchange(attack_, Attack::kNone)) {
    case Attack::kChange:
      bytes[place] ^= 1;
      break;
    case Attack::kRepeat:
      bytes += bytes;
      break;
    case Attack::kDrop:
      bytes.resize(place);
      break;
    case Attack::kNone:
      break;
  }
  return bytes;
}

}  // namespace jaxhet::testing
