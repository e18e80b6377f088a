"""The layers of the engine: one package each, which names the layers that may use it."""

load("@rules_cc//cc:defs.bzl", "cc_library")

COPTS = ["-std=c++20", "-Wall", "-Wextra", "-Werror"]

def layer(name, users, deps = [], linkopts = []):
    """All sources of a package, as a library.

    Args:
      name: Name of the package's folder.
      users: Layers that may use this one; so may the tests.
      deps: Layers below that this one uses.
      linkopts: Libraries of the system.
    """
    cc_library(
        name = name,
        srcs = native.glob(["**/*.cc"]),
        hdrs = native.glob(["**/*.h"]),
        copts = COPTS,
        linkopts = linkopts,
        visibility = ["//:__pkg__"] + ["//xla_plugin/%s:__pkg__" % user for user in users],
        deps = ["//xla_plugin/" + dep for dep in deps],
    )
