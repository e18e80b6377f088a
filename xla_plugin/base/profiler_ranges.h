#ifndef XLA_PLUGIN_BASE_PROFILER_RANGES_H_
#define XLA_PLUGIN_BASE_PROFILER_RANGES_H_

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "xla_plugin/base/function.h"
#include "xla_plugin/base/library.h"

namespace jaxhet {

// A library that passes named ranges of time to a profiler, and the names of its entry points.
struct RangeLibrary {
  const char* name;
  const char* start;
  const char* end;
  const char* push;
  const char* pop;
};

// NVIDIA's NVTX for Nsight Systems, and AMD's rocTX for rocprofv3, in order of preference.
inline constexpr std::array kRangeLibraries = {
    RangeLibrary{"libnvToolsExt.so.1", "nvtxRangeStartA", "nvtxRangeEnd", "nvtxRangePushA",
                 "nvtxRangePop"},
    RangeLibrary{"libnvtx3interop.so.1", "nvtxRangeStartA", "nvtxRangeEnd", "nvtxRangePushA",
                 "nvtxRangePop"},
    RangeLibrary{"librocprofiler-sdk-roctx.so.1", "roctxRangeStartA", "roctxRangeStop",
                 "roctxRangePushA", "roctxRangePop"},
    RangeLibrary{"libroctx64.so.4", "roctxRangeStartA", "roctxRangeStop", "roctxRangePushA",
                 "roctxRangePop"},
};

// Loaded entry points of one such library. All threads may call them.
struct ProfilerRanges {
  Library library;
  RangeLibrary names;

  // Starts a range of the process, which any thread may end by its id.
  Function<uint64_t(const char*)> start{library, names.start};
  Function<void(uint64_t)> end{library, names.end};
  // Starts a range of the calling thread; ends the thread's latest one.
  Function<int(const char*)> push{library, names.push};
  Function<int()> pop{library, names.pop};
};

// Entry points of the program itself, as a profiler preloads them, or else the first of `libraries`
// that can be loaded. Throws UsageError with the loader's words if none can be loaded.
ProfilerRanges LoadProfilerRanges(std::span<const RangeLibrary> libraries = kRangeLibraries);

// Range of the calling thread during the object's life; nothing without `ranges`.
class ScopedRange {
 public:
  // `name` makes the name, and is called only with `ranges`.
  template <typename Name>
  ScopedRange(const std::optional<ProfilerRanges>& ranges, const Name& name)
      : ranges_(ranges ? &*ranges : nullptr) {
    if (ranges_ != nullptr) ranges_->push(name().c_str());
  }
  ~ScopedRange() {
    if (ranges_ != nullptr) ranges_->pop();
  }
  ScopedRange(const ScopedRange&) = delete;
  ScopedRange& operator=(const ScopedRange&) = delete;

 private:
  const ProfilerRanges* const ranges_;
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_BASE_PROFILER_RANGES_H_
