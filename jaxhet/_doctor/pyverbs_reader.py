"""Prints as JSON what pyverbs sees of this machine's RDMA NICs: {NIC: {port: {...}}}.

Runs in any Python that has pyverbs, even one too old for jaxhet; see second_look.py.
"""

import importlib
import json
from typing import Any


def _port(context: Any, number: int) -> dict[str, Any]:
    port = context.query_port(number)
    return {
        "state": port.state,
        "active_mtu": 128 << port.active_mtu,
        "gids": [str(context.query_gid(number, i).gid) for i in range(port.gid_tbl_len)],
    }


def main() -> None:
    """Opens each NIC. Prints the error in place of ports if a NIC can't be opened."""
    pyverbs = importlib.import_module("pyverbs.device")
    nics: dict[str, Any] = {}
    for device in pyverbs.get_device_list():
        name = device.name.decode()
        try:
            context = pyverbs.Context(name=name)
            count = context.query_device().phys_port_cnt
            nics[name] = {str(i): _port(context, i) for i in range(1, count + 1)}
        except Exception as error:  # pyverbs has error classes of its own
            nics[name] = {"error": str(error)}
    print(json.dumps(nics))


if __name__ == "__main__":
    main()
