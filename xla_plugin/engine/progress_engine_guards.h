#ifndef XLA_PLUGIN_ENGINE_PROGRESS_ENGINE_GUARDS_H_
#define XLA_PLUGIN_ENGINE_PROGRESS_ENGINE_GUARDS_H_

#include "xla_plugin/base/error.h"
#include "xla_plugin/engine/messages.h"
#include "xla_plugin/engine/progress_engine.h"

// Guards of ProgressEngine against errors of its parts, for its own files.
namespace jaxhet {

// Runs a part of the engine; its error fails the engine.
template <typename Function>
void ProgressEngine::Guarded(Function function) {
  try {
    function();
  } catch (const Error& error) {
    Fail(error);
  } catch (...) {  // nor may the progress thread end
    const Error error = CurrentError();
    Fail(Error(error.code(), StrCat("[", roster_.OwnName(), "] ", error.text())));
  }
}

// Adds to an error of `function` that names no process yet the name of `peer`.
template <typename Function>
void ProgressEngine::AttributeTo(Peer& peer, Function function) {
  try {
    function();
  } catch (const Error& error) {
    if (error.failed_process() >= 0) throw;
    throw Error(error.code(),
                StrCat(Where(peer.process), error.text(), MovedText(Moved(peer.process))),
                peer.process);
  }
}

}  // namespace jaxhet

#endif  // XLA_PLUGIN_ENGINE_PROGRESS_ENGINE_GUARDS_H_
