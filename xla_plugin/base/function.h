#ifndef XLA_PLUGIN_BASE_FUNCTION_H_
#define XLA_PLUGIN_BASE_FUNCTION_H_

#include "xla_plugin/base/library.h"

namespace jaxhet {

template <typename Signature>
class Function;

// An entry point of a library.
template <typename Result, typename... Parameters>
class Function<Result(Parameters...)> {
 public:
  using Signature = Result(Parameters...);
  enum Presence { kRequired, kOptional };

  // Throws if a required one is missing.
  Function(const Library& library, const char* name, Presence presence = kRequired)
      : name_(name),
        address_(reinterpret_cast<Signature*>(presence == kRequired ? library.Require(name)
                                                                    : library.Find(name))) {}

  const char* name() const { return name_; }
  explicit operator bool() const { return address_ != nullptr; }
  Result operator()(Parameters... arguments) const { return address_(arguments...); }

 private:
  const char* name_;
  Signature* address_;
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_BASE_FUNCTION_H_
