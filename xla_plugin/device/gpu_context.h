#ifndef XLA_PLUGIN_DEVICE_GPU_CONTEXT_H_
#define XLA_PLUGIN_DEVICE_GPU_CONTEXT_H_

#include <string>
#include <string_view>
#include <utility>

#include "xla_plugin/base/error.h"
#include "xla_plugin/base/function.h"
#include "xla_plugin/device/device.h"
#include "xla_plugin/device/failure.h"

namespace jaxhet {

// Code that CUDA's driver and HIP share. An Api holds the entry points under the same names
// with the same signatures, the values of the flags, and the few calls that differ.

// A result that is not success must not stay behind as the thread's "last error": XLA looks at that
// after its own calls. Both of these clear it.

template <typename Api, typename... Parameters, typename... Arguments>
int Try(const Api& api, const Function<int(Parameters...)>& function, Arguments... arguments) {
  const int result = function(arguments...);
  if (result != kGpuSuccess) api.ClearLastError();
  return result;
}

template <typename Api>
void Check(const Api& api, const char* call, std::string_view where, int result) {
  if (result == kGpuSuccess) return;
  api.ClearLastError();
  ThrowFailure(call, where, api.Describe(result));
}

template <typename Api, typename... Parameters, typename... Arguments>
void CallOn(const Api& api, std::string_view where, const Function<int(Parameters...)>& function,
            Arguments... arguments) {
  Check(api, function.name(), where, function(arguments...));
}

// The primary context of a device, and calls in it. Any thread may call it.
template <typename Api>
class GpuContext {
 public:
  GpuContext(Api api, const DeviceInfo& info)
      : api_(std::move(api)), where_(info.ToString()), ordinal_(info.ordinal) {
    Check(api_, Api::kRetainName, where_, api_.Retain(ordinal_, &context_));
  }
  ~GpuContext() { api_.Release(ordinal_); }
  GpuContext(const GpuContext&) = delete;
  GpuContext& operator=(const GpuContext&) = delete;

  const Api& api() const { return api_; }
  int ordinal() const { return ordinal_; }

  template <typename... Parameters, typename... Arguments>
  void Call(const Function<int(Parameters...)>& function, Arguments... arguments) const {
    const Current current(*this);
    CallOn(api_, where_, function, arguments...);
  }

  // `act` gives the name of a call and its result.
  template <typename Act>
  void Run(Act act) const {
    const Current current(*this);
    const auto [call, result] = act(api_);
    Check(api_, call, where_, result);
  }

  bool IsIdle(StreamHandle stream) const {
    const Current current(*this);
    const int result = Try(api_, api_.stream_query, stream);
    if (result == kGpuNotReady) return false;
    Check(api_, api_.stream_query.name(), where_, result);
    return true;
  }

  // Releases; a failure is logged.
  template <typename Handle>
  void Undo(const Function<int(Handle)>& function, Handle handle) const noexcept {
    Logged([&] { Call(function, handle); });
  }
  template <typename Act>
  void RunUndo(Act act) const noexcept {
    Logged([&] { Run(act); });
  }

 private:
  // Makes the device current for the calling thread, and what was current before afterwards.
  class Current {
   public:
    explicit Current(const GpuContext& gpu) : api_(gpu.api_) {
      Check(api_, Api::kEnterName, gpu.where_, api_.Enter(gpu.context_, &before_));
    }
    ~Current() { api_.Leave(before_); }
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    const Api& api_;
    Api::Context before_{};
  };

  template <typename Act>
  static void Logged(Act act) noexcept {
    try {
      act();
    } catch (const Error& error) {
      LogLine(error.what());
    }
  }

  const Api api_;
  const std::string where_;
  const int ordinal_;
  Api::Context context_{};
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_DEVICE_GPU_CONTEXT_H_
