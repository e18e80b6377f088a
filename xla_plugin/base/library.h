#ifndef XLA_PLUGIN_BASE_LIBRARY_H_
#define XLA_PLUGIN_BASE_LIBRARY_H_

#include <span>
#include <string>
#include <string_view>

#include "xla_plugin/base/error.h"

namespace jaxhet {

// A shared library that is loaded at run time. It stays loaded: drivers have threads of their own.
class Library {
 public:
  // The first of `names` that can be loaded; nullptr is the program itself. Throws an error of
  // `code` with the loader's words if none can be loaded.
  explicit Library(std::span<const char* const> names, ErrorCode code = ErrorCode::kDevice);

  const std::string& name() const { return name_; }
  // The address of `symbol`, or nullptr.
  void* Find(const char* symbol) const;
  // The same, but throws if it is missing.
  void* Require(const char* symbol) const;

 private:
  ErrorCode code_;
  std::string name_;
  void* handle_ = nullptr;
};

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

#endif  // XLA_PLUGIN_BASE_LIBRARY_H_
