#ifndef XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_LANE_CHANNEL_H_
#define XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_LANE_CHANNEL_H_

#include <cstddef>
#include <memory>
#include <vector>

#include "xla_plugin/transport/device_channel/lane.h"
#include "xla_plugin/transport/device_channel/proxied_channel.h"

namespace jaxhet {

// An end of a proxied channel whose chunks lanes carry, in turns, from the source's slots to the
// target's.
class LaneChannel : public ProxiedChannel {
 public:
  uint64_t num_path_failures() const override;
  void Settle(Proxy& proxy) override;
  void Launched() override;
  void Cut() override;

 protected:
  enum class End { kSource, kTarget };
  LaneChannel(const ChannelSetup& setup, End end, std::vector<std::shared_ptr<Lane>> lanes);
  // `slots` as lanes know them; on the device they are at `device_address`.
  void SetSlots(std::byte* slots, void* device_address, size_t slot_bytes);

  const std::vector<std::shared_ptr<Lane>>& lanes() const { return lanes_; }

 private:
  const End end_;
  std::vector<std::shared_ptr<Lane>> lanes_;
  std::byte* slots_ = nullptr;
  std::vector<std::unique_ptr<Lane::Direction>> directions_;  // one for each lane, once settled
  std::unique_ptr<ChunkCounter> launched_;
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_TRANSPORT_DEVICE_CHANNEL_LANE_CHANNEL_H_
