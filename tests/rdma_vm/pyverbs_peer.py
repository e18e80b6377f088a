"""The other end of a verbs connection, written with pyverbs by what wire.h says.

    pyverbs_peer.py VERBS_PEER_BENCH BYTES TIMES

Starts the program at the other end of a socket, and exchanges TIMES messages of BYTES bytes with
it, to and fro; both check every byte. Runs on the guest's own Python.
"""

# pyright: reportMissingImports=false

import itertools
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable

import pyverbs.enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

_MAGIC = 0x3256584A
_OFFER = struct.Struct("<4I3Q")
_NIC_PAIR = struct.Struct("<64s16s2I2H")
_QP_INFO = struct.Struct("<2I")
_CHUNK = struct.Struct("<3Q8I")
_HEADER_BYTES = 64
_KIND_CHUNK, _KIND_CREDIT = 0, 1
_MOST_CREDITS = 7

_NUM_QPS, _NUM_SLOTS = 3, 5
_CHUNK_BYTES, _SLOT_BYTES = 100_000, 1 << 17  # other than the program's
_NUM_RECEIVES = 64
_GID_INDEX = 1
_PSN = 0x5678
_TIMEOUT_S = 30


# Row v has v added to each byte.
_ROWS = [bytes((i * 131 + v) & 0xFF for i in range(256)) for v in range(256)]


def content(number: int, num_bytes: int) -> bytes:
    """Message `number`: Pattern of tests/cpp/world.cc, by rows of 256 bytes."""
    seed = number * 31 + 1
    rows = range(num_bytes // 256 + 1)
    return b"".join(_ROWS[(row + seed) & 0xFF] for row in rows)[:num_bytes]


def _packed(immediate: tuple[int, int, int]) -> int:
    kind, slot, sequence = immediate
    return socket.htonl(kind << 24 | slot << 16 | sequence & 0xFFFF)


def _unpacked(packed: int) -> tuple[int, int, int]:
    immediate = socket.ntohl(packed)
    return immediate >> 24, immediate >> 16 & 0xFF, immediate & 0xFFFF


class End:
    """Our end: one NIC pair of `_NUM_QPS` queue pairs, the first for credits."""

    def __init__(self, control: socket.socket):
        self._control = control
        self._context = Context(name="rxe0")
        self._domain = PD(self._context)
        self._cq = CQ(self._context, 1024)
        memory = _NUM_SLOTS * _SLOT_BYTES
        access = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE
        self._outgoing = MR(self._domain, memory, e.IBV_ACCESS_LOCAL_WRITE)
        self._incoming = MR(self._domain, memory, access)
        capacity = QPCap(max_send_wr=64, max_recv_wr=_NUM_RECEIVES)
        init = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self._cq, rcq=self._cq, cap=capacity)
        self._qps = [QP(self._domain, init) for _ in range(_NUM_QPS)]
        self._next_qp = itertools.cycle(range(1, _NUM_QPS))
        self._sequences = [0] * _NUM_SLOTS
        self._filled = [0] * _NUM_SLOTS
        self._due: list[tuple[int, int, int]] = []  # credits, for our next chunk or alone
        self._message = bytearray()  # the message that is being received
        self._number = -1
        self._received = 0

    def connect(self) -> None:
        """Exchanges offers and brings the queue pairs up."""
        self._write(self._offer())
        self._accept(self._read())
        self.meet()

    def meet(self) -> None:
        """Returns when both ends are here."""
        self._write(b"")
        assert self._read() == b""

    def send(self, number: int, message: bytes) -> None:
        """Sends a message chunk by chunk, each into the next slot that the peer has emptied."""
        for offset in range(0, len(message), self._chunk_bytes):
            self._until(lambda: bool(self._free), "a free slot")
            chunk = message[offset : offset + self._chunk_bytes]
            slot = self._free.pop(0)
            self._sequences[slot] += 1
            header = _CHUNK.pack(
                number, offset, len(chunk), self._sequences[slot], *self._credits_of_a_chunk()
            )
            data = header.ljust(_HEADER_BYTES, b"\0") + chunk
            self._outgoing.write(data, len(data), slot * _SLOT_BYTES)
            source = SGE(self._outgoing.buf + slot * _SLOT_BYTES, len(data), self._outgoing.lkey)
            immediate = (_KIND_CHUNK, slot, self._sequences[slot])
            self._post(next(self._next_qp), source, self._slots + slot * self._stride, immediate)

    def receive(self, number: int, num_bytes: int) -> bytes:
        """Waits for a message."""
        self._message = bytearray(num_bytes)
        self._number = number
        self._received = 0
        self._until(lambda: self._received == num_bytes, f"message {number}")
        return bytes(self._message)

    def finish(self) -> None:
        """Waits until the peer has emptied all slots, as we have."""
        self._send_credits()
        self._until(lambda: len(self._free) == self._num_slots, "all slots to be free")

    def _until(self, holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _TIMEOUT_S
        while not holds():
            assert time.monotonic() < deadline, f"waited too long for {what}"
            self._progress()

    def _write(self, message: bytes) -> None:
        self._control.sendall(struct.pack("<Q", len(message)) + message)

    def _read(self) -> bytes:
        (size,) = struct.unpack("<Q", self._control.recv(8, socket.MSG_WAITALL))
        return self._control.recv(size, socket.MSG_WAITALL) if size else b""

    def _offer(self) -> bytes:
        sizes = (_NUM_SLOTS, _SLOT_BYTES, _CHUNK_BYTES, self._incoming.buf)
        mtu = self._context.query_port(1).active_mtu
        gid = bytes.fromhex(str(self._context.query_gid(1, _GID_INDEX)).replace(":", ""))
        offer = _OFFER.pack(_MAGIC, 1, _NUM_QPS, *sizes)
        offer += _NIC_PAIR.pack(b"rxe0:1", gid, self._incoming.rkey, mtu, 0, 0)
        return offer + b"".join(_QP_INFO.pack(qp.qp_num, _PSN) for qp in self._qps)

    def _accept(self, offer: bytes) -> None:
        magic, _, num_qps, num_slots, stride, chunk_bytes, slots = _OFFER.unpack_from(offer)
        assert (magic, num_qps) == (_MAGIC, _NUM_QPS)
        self._num_slots = min(_NUM_SLOTS, num_slots)
        self._free = list(range(self._num_slots))
        self._chunk_bytes = min(_CHUNK_BYTES, chunk_bytes)
        self._stride, self._slots = stride, slots
        _, gid, self._rkey, mtu, _, _ = _NIC_PAIR.unpack_from(offer, _OFFER.size)
        infos = _QP_INFO.iter_unpack(
            offer[_OFFER.size + _NIC_PAIR.size :][: num_qps * _QP_INFO.size]
        )
        text = ":".join(gid[i : i + 2].hex() for i in range(0, 16, 2))
        for qp, (number, psn) in zip(self._qps, infos, strict=True):
            route = GlobalRoute(dgid=GID(text), sgid_index=_GID_INDEX)
            route.hop_limit = 255
            attributes = QPAttr(port_num=1)
            attributes.qp_access_flags = e.IBV_ACCESS_REMOTE_WRITE
            attributes.ah_attr = AHAttr(gr=route, is_global=1, port_num=1)
            attributes.dest_qp_num, attributes.rq_psn, attributes.sq_psn = number, psn, _PSN
            attributes.path_mtu = mtu
            attributes.max_rd_atomic = attributes.max_dest_rd_atomic = 1
            attributes.timeout, attributes.retry_cnt, attributes.rnr_retry = 18, 7, 7
            attributes.min_rnr_timer = 12
            qp.to_rts(attributes)
            for _ in range(_NUM_RECEIVES):
                qp.post_recv(self._nothing_to_receive())

    def _post(self, qp: int, source: SGE, address: int, immediate: tuple[int, int, int]) -> None:
        work = SendWR(
            wr_id=qp,
            opcode=e.IBV_WR_RDMA_WRITE_WITH_IMM,
            num_sge=1,
            sg=[source],
            imm_data=_packed(immediate),
            send_flags=e.IBV_SEND_SIGNALED,
        )
        work.set_wr_rdma(self._rkey, address)
        self._qps[qp].post_send(work)

    def _progress(self) -> None:
        _, completions = self._cq.poll(16)
        for completion in completions:
            assert completion.status == e.IBV_WC_SUCCESS, completion
            if completion.opcode != e.IBV_WC_RECV_RDMA_WITH_IMM:
                continue
            (found,) = (qp for qp in self._qps if qp.qp_num == completion.qp_num)
            found.post_recv(self._nothing_to_receive())
            kind, slot, sequence = _unpacked(completion.imm_data)
            if kind == _KIND_CREDIT:
                self._on_credit(slot, sequence)
            else:
                self._take(slot, sequence)

    def _take(self, slot: int, sequence: int) -> None:
        self._filled[slot] += 1
        header = self._incoming.read(_HEADER_BYTES, slot * _SLOT_BYTES)
        number, offset, num_bytes, its_sequence, *credits = _CHUNK.unpack_from(header)
        assert (number, its_sequence) == (self._number, sequence)
        assert sequence == self._filled[slot] & 0xFFFF
        for kind, its_slot, its_sequence in map(_unpacked, filter(None, credits)):
            assert kind == _KIND_CREDIT
            self._on_credit(its_slot, its_sequence)
        data = self._incoming.read(num_bytes, slot * _SLOT_BYTES + _HEADER_BYTES)
        self._message[offset : offset + num_bytes] = data
        self._received += num_bytes
        self._due.append((_KIND_CREDIT, slot, sequence))
        if 2 * len(self._due) > self._num_slots:
            self._send_credits()

    def _on_credit(self, slot: int, sequence: int) -> None:
        assert sequence == self._sequences[slot] & 0xFFFF
        self._free.append(slot)

    def _send_credits(self) -> None:
        for credit in self._due:
            self._post(0, self._nothing(), self._slots, credit)
        self._due.clear()

    def _credits_of_a_chunk(self) -> list[int]:
        taken, self._due = self._due[:_MOST_CREDITS], self._due[_MOST_CREDITS:]
        return [_packed(credit) for credit in taken] + [0] * (_MOST_CREDITS - len(taken))

    def _nothing(self) -> SGE:
        """No bytes: pyverbs wants a piece of memory with every work request."""
        return SGE(self._outgoing.buf, 0, self._outgoing.lkey)

    def _nothing_to_receive(self) -> RecvWR:
        return RecvWR(num_sge=1, sg=[self._nothing()])


def main() -> None:
    program, num_bytes, times = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    control, theirs = socket.socketpair()
    command = [program, str(num_bytes), str(times), str(512 << 10), str(theirs.fileno())]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as process, control:
        theirs.close()
        end = End(control)
        end.connect()
        end.meet()  # it waits for message 0
        for number in range(0, 2 * times, 2):
            end.send(number, content(number, num_bytes))
            answer = end.receive(number + 1, num_bytes)
            assert answer == content(number + 1, num_bytes), f"message {number + 1} is wrong"
        end.finish()
        end.meet()
    assert process.returncode == 0
    print(f"{times} messages of {num_bytes} bytes each way")


if __name__ == "__main__":
    main()
