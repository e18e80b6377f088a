#include "xla_plugin/base/profiler_ranges.h"

#include "xla_plugin/base/error.h"

namespace jaxhet {
namespace {

ProfilerRanges Load(const char* file, const RangeLibrary& names) {
  return {.library = Library(std::span(&file, 1), ErrorCode::kUsage), .names = names};
}

}  // namespace

ProfilerRanges LoadProfilerRanges(std::span<const RangeLibrary> libraries) {
  const char* const program = nullptr;
  const Library itself(std::span(&program, 1), ErrorCode::kUsage);
  for (const RangeLibrary& names : libraries) {
    if (itself.Find(names.start) != nullptr) return Load(program, names);
  }
  std::string reasons;
  for (const RangeLibrary& names : libraries) {
    try {
      return Load(names.name, names);
    } catch (const Error& error) {
      reasons += StrCat(reasons.empty() ? "" : "; ", error.text());
    }
  }
  Throw(ErrorCode::kUsage,
        "JAXHET_PROFILER_RANGES=1 needs NVIDIA's NVTX or AMD's rocTX, and neither can be loaded (",
        reasons, "). Install one of them where the loader finds it, or unset the option");
}

}  // namespace jaxhet
