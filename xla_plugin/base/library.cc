#include "xla_plugin/base/library.h"

#include <dlfcn.h>

namespace jaxhet {

Library::Library(std::span<const char* const> names, ErrorCode code) : code_(code) {
  std::string reasons;
  for (const char* const name : names) {
    name_ = name == nullptr ? "this program" : name;
    handle_ = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (handle_ != nullptr) return;
    reasons += StrCat(reasons.empty() ? "" : "; ", dlerror());
  }
  Throw(code_, "dlopen: ", reasons);
}

void* Library::Find(const char* symbol) const { return dlsym(handle_, symbol); }

void* Library::Require(const char* symbol) const {
  void* const address = Find(symbol);
  if (address == nullptr) {
    Throw(code_, name_, " has no ", symbol, ": it is older than jaxhet needs; update it");
  }
  return address;
}

}  // namespace jaxhet
