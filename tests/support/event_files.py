"""A reader of TensorBoard's event files."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tensorboardX.proto import event_pb2
from tensorboardX.record_writer import masked_crc32c

_MESSAGES: Any = event_pb2  # the import creates the classes


def events(folder: Path) -> Iterator[Any]:
    """The events of all files, in the order of their names.

    A record is its length (8 bytes), a checksum (4), the message and a checksum (4): TFRecord.
    """
    for path in sorted(folder.glob("events.out.tfevents.*")):
        data = path.read_bytes()
        while data:
            (size,) = struct.unpack_from("<Q", data)
            message = data[12 : 12 + size]
            checksums = [data[8:12], data[12 + size : 16 + size]]
            assert checksums == [struct.pack("<I", masked_crc32c(x)) for x in (data[:8], message)]
            yield _MESSAGES.Event.FromString(message)
            data = data[16 + size :]
