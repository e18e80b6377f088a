#ifndef XLA_PLUGIN_ENGINE_DEVICE_DEVICE_HANDLES_H_
#define XLA_PLUGIN_ENGINE_DEVICE_DEVICE_HANDLES_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <tuple>

#include "xla_plugin/device/device.h"
#include "xla_plugin/engine/common/handles.h"
#include "xla_plugin/engine/device/device_rank.h"

namespace jaxhet {

// The exchanges of `jaxhet.start` on one device: an exchange moves a copy of the operand into
// memory of its own, from which each `jaxhet.finish` copies one member's part.
class DeviceHandles {
 public:
  explicit DeviceHandles(DeviceRank& rank);

  // Allocates memory for a start's exchange, when its plan is registered: not in a program, whose
  // launch would wait. The driver may wait for running programs, which end
  // without this thread. No arena has room for it: the size is unknown before, and can be that of
  // all parameters.
  void Reserve(int64_t handle, size_t operand_bytes, size_t group_size);
  // Called as DeviceRank's functions of these names are. The request is a start or a finish.
  std::optional<LaunchMismatch> Start(const DeviceRequest& request);
  void Done(const DeviceRequest& request);
  // Lets the exchanges end that were never finished.
  void Drain();
  Unfinished unfinished() const;

 private:
  struct Memory {
    DeviceMemory operand;
    DeviceMemory result;  // parts of all members
  };
  struct Handle {
    HandleState state;
    std::byte* result = nullptr;
    size_t num_bytes = 0;
    SharedList<int> group;
    bool is_known = false;  // it was started
    bool is_done = false;   // the program's stream waits for its data
  };

  void Await(Handle& handle, StreamHandle stream);

  DeviceRank& rank_;
  const Stream stream_;
  mutable std::mutex mutex_;
  // By key of a handle, bytes and number of members: programs of several shapes have one name.
  std::map<std::tuple<int64_t, size_t, size_t>, Memory> memory_;
  std::map<int64_t, Handle> handles_;  // by key
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_ENGINE_DEVICE_DEVICE_HANDLES_H_
