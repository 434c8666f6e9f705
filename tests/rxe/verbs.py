"""Step by step in the guest: the kernel's queue pairs against soft-roce's, through libibverbs.

Usage: verbs.py HOST PORT GID_INDEX MTU LOSS SIZE.. One line per case; what soft-roce does is told to its `scripted`
example. Cases that move memory are run with each size. With LOSS other than 0, nothing is asked for that is refused: a
refusal is said once, and where it is lost, the peer knows only that nobody answers.
"""

import ipaddress
import socket
import sys
import time

import pyverbs.enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

# No single step takes longer, even where the emulated machine has little of the processor; in seconds.
PATIENCE = 60
# Of each side's memory: the largest message, and what surrounds it.
BYTES = (8 << 20) + 128
ACCESS = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ | e.IBV_ACCESS_REMOTE_ATOMIC
SUCCESS, LOCAL_LENGTH, REMOTE_INVALID, REMOTE_ACCESS, REMOTE_OPERATION = 0, 1, 9, 10, 11
IMMEDIATE = 0x01020304
OWN_PSN = 0xFFFFF0  # wraps within the first case that moves more than 16 packets


# The pattern repeats after 65,536 bytes; the emulated processor is too slow to compute more than once.
PERIOD = bytes((at * 31 + at // 256) % 256 for at in range(65_536))


def pattern(seed, count):
    shifted = PERIOD.translate(bytes((value + seed) % 256 for value in range(256)))
    return (shifted * (count // len(shifted) + 1))[:count]


class Host:
    """soft-roce's end: a line each way."""

    def __init__(self, address, port):
        self.lines = socket.create_connection((address, port), PATIENCE).makefile("rw", newline="\n")

    def __call__(self, *words):
        self.lines.write(" ".join(map(str, words)) + "\n")
        self.lines.flush()
        answer = self.lines.readline().strip()
        assert answer and not answer.startswith("error"), answer or "the host has closed"
        return answer

    def wait(self):
        status, count, immediate = self("wait").split()
        return int(status), int(count), None if immediate == "-" else int(immediate)

    def word(self):
        return int.from_bytes(bytes.fromhex(self("dump", 0, 8)), "little")

    def expect(self, seed, count, offset=0, start=0):
        """Bytes from `offset` on are those of the pattern from `start` on."""
        expect(self("compare", seed, offset, count, start), "same", "memory")


class Pair:
    """A fresh pair of queue pairs: ours by the kernel, the other by soft-roce."""

    def __init__(self, host, pd, cq, mr, gid_index, own_gid, host_gid, mtu):
        self.host, self.cq, self.mr = host, cq, mr
        while cq.poll(1)[0]:
            pass
        cap = QPCap(max_send_wr=16, max_recv_wr=16, max_send_sge=1, max_recv_sge=1)
        self.qp = QP(pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=cap))
        answer = host("connect", f"{self.qp.qp_num:x}", f"{OWN_PSN:x}", own_gid.replace(":", ""))
        number, psn, self.rkey, self.address = map(int, answer.split())
        attr = QPAttr(port_num=1)
        attr.qp_access_flags = ACCESS
        self.qp.to_init(attr)
        attr.ah_attr = AHAttr(gr=GlobalRoute(dgid=GID(host_gid), sgid_index=gid_index), is_global=1, port_num=1)
        attr.dest_qp_num, attr.rq_psn, attr.path_mtu = number, psn, mtu.bit_length() - 8
        attr.max_dest_rd_atomic, attr.min_rnr_timer = 4, 14
        self.qp.to_rtr(attr)
        # Of retries, rdma_rxe takes 7 for endless: a busy machine is no failure.
        attr.timeout, attr.retry_cnt, attr.rnr_retry, attr.sq_psn, attr.max_rd_atomic = 14, 7, 7, OWN_PSN, 4
        self.qp.to_rts(attr)

    def post(self, opcode, count, rkey=None, offset=0, immediate=None, atomic=None):
        sge = SGE(self.mr.buf, count, self.mr.lkey)
        wr = SendWR(opcode=opcode, num_sge=1, sg=[sge], send_flags=e.IBV_SEND_SIGNALED,
                    imm_data=socket.htonl(immediate or 0))
        rkey = self.rkey if rkey is None else rkey
        if atomic:
            wr.set_wr_atomic(rkey, self.address + offset, *atomic)
        else:
            wr.set_wr_rdma(rkey, self.address + offset)
        self.qp.post_send(wr)

    def receive(self, count):
        self.qp.post_recv(RecvWR(num_sge=1, sg=[SGE(self.mr.buf, count, self.mr.lkey)]))

    def wait(self):
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            found, completions = self.cq.poll(1)
            if found:
                return completions[0]
        raise AssertionError(f"the kernel completed nothing in {PATIENCE} s")

    def status(self):
        return self.wait().status

    def fill(self, seed, count):
        self.mr.write(pattern(seed, count), count)

    def clear(self, count):
        self.mr.write(bytes(count), count)

    def word(self):
        return int.from_bytes(self.mr.read(8, 0), "little")


def expect(found, expected, what="status"):
    if isinstance(expected, bytes) and found != expected:
        at = next((k for k, (a, b) in enumerate(zip(found, expected)) if a != b), min(len(found), len(expected)))
        raise AssertionError(f"{what}: differs at byte {at} of {len(expected)}")
    assert found == expected, f"{what}: found {found}, expected {expected}"


def kernel_writes(pair, count):
    pair.host("fill", 7)
    pair.fill(1, count)
    pair.post(e.IBV_WR_RDMA_WRITE, count, offset=64)
    expect(pair.status(), SUCCESS)
    pair.host.expect(7, 64)
    pair.host.expect(1, count, offset=64)
    pair.host.expect(7, 64, offset=64 + count, start=64 + count)


def kernel_reads(pair, count):
    pair.host("fill", 2)
    pair.clear(count + 1)
    pair.post(e.IBV_WR_RDMA_READ, count, offset=64)
    expect(pair.status(), SUCCESS)
    expect(pair.mr.read(count + 1, 0), pattern(2, count + 64)[64:] + b"\0", "memory")


def soft_writes(pair, count):
    pair.host("fill", 3)
    pair.clear(count + 128)
    pair.host("write", count, pair.mr.buf + 64, pair.mr.rkey)
    expect(pair.host.wait()[0], SUCCESS)
    expect(pair.mr.read(count + 128, 0), bytes(64) + pattern(3, count) + bytes(64), "memory")


def soft_reads(pair, count):
    pair.host("fill", 0)
    pair.fill(4, count + 64)
    pair.host("read", count, pair.mr.buf + 64, pair.mr.rkey)
    expect(pair.host.wait()[0], SUCCESS)
    pair.host.expect(4, count, start=64)


def kernel_sends(pair, count):
    pair.fill(5, count)
    pair.host("recv", count)
    pair.post(e.IBV_WR_SEND_WITH_IMM, count, immediate=IMMEDIATE)
    expect(pair.status(), SUCCESS)
    expect(pair.host.wait(), (SUCCESS, count, IMMEDIATE), "receive")
    pair.host.expect(5, count)


def soft_sends(pair, count):
    pair.host("fill", 6)
    pair.receive(count)
    pair.host("send_imm", count, IMMEDIATE)
    expect(pair.host.wait()[0], SUCCESS)
    done = pair.wait()
    expect((done.status, done.byte_len, socket.ntohl(done.imm_data)), (SUCCESS, count, IMMEDIATE), "receive")
    expect(pair.mr.read(count, 0), pattern(6, count), "memory")


def kernel_writes_with_immediate(pair):
    pair.fill(8, 5000)
    pair.host("recv", 0)
    pair.post(e.IBV_WR_RDMA_WRITE_WITH_IMM, 5000, immediate=IMMEDIATE)
    expect(pair.status(), SUCCESS)
    expect(pair.host.wait(), (SUCCESS, 5000, IMMEDIATE), "receive")
    pair.host.expect(8, 5000)


def soft_writes_with_immediate(pair):
    pair.host("fill", 9)
    pair.receive(0)
    pair.host("write_imm", 5000, pair.mr.buf, pair.mr.rkey, IMMEDIATE)
    expect(pair.host.wait()[0], SUCCESS)
    done = pair.wait()
    expect((done.status, socket.ntohl(done.imm_data)), (SUCCESS, IMMEDIATE), "receive")
    expect(pair.mr.read(5000, 0), pattern(9, 5000), "memory")


def soft_lists(pair):
    pair.host("pieces", 3)
    for run in (soft_sends, kernel_sends, soft_writes, soft_reads):
        run(pair, 10_001)
    pair.host("pieces", 1)


def kernel_bad_key(pair):
    for opcode in (e.IBV_WR_RDMA_READ, e.IBV_WR_RDMA_WRITE):
        pair = pair.again()
        pair.post(opcode, 64, rkey=pair.rkey ^ 0x1000)
        expect(pair.status(), REMOTE_ACCESS)


def soft_bad_key(pair):
    for operation in ("read", "write"):
        pair = pair.again()
        pair.host(operation, 64, pair.mr.buf, pair.mr.rkey ^ 1)
        expect(pair.host.wait()[0], REMOTE_ACCESS)


def kernel_out_of_range(pair):
    for opcode in (e.IBV_WR_RDMA_READ, e.IBV_WR_RDMA_WRITE):
        pair = pair.again()
        pair.post(opcode, 64, offset=BYTES - 63)
        expect(pair.status(), REMOTE_ACCESS)


def soft_out_of_range(pair):
    for operation in ("read", "write"):
        pair = pair.again()
        pair.host(operation, 64, pair.mr.buf + BYTES - 63, pair.mr.rkey)
        expect(pair.host.wait()[0], REMOTE_ACCESS)


def kernel_waits_for_receive(pair):
    pair.fill(10, 10_000)
    pair.post(e.IBV_WR_SEND, 10_000)
    time.sleep(0.004)
    pair.host("recv", 10_000)
    expect(pair.status(), SUCCESS)
    expect(pair.host.wait(), (SUCCESS, 10_000, None), "receive")
    pair.host.expect(10, 10_000)


def soft_waits_for_receive(pair):
    pair.host("fill", 11)
    pair.host("send", 10_000)
    time.sleep(0.01)
    pair.receive(10_000)
    expect(pair.host.wait()[0], SUCCESS)
    expect(pair.status(), SUCCESS)
    expect(pair.mr.read(10_000, 0), pattern(11, 10_000), "memory")


def kernel_sends_too_much(pair):
    pair.host("recv", 10)
    pair.post(e.IBV_WR_SEND, 100)
    expect(pair.status(), REMOTE_INVALID)
    expect(pair.host.wait()[0], LOCAL_LENGTH)


def soft_sends_too_much(pair):
    pair.receive(10)
    pair.host("send", 100)
    # The specification says invalid request, rdma_rxe that its own operation failed.
    status = pair.host.wait()[0]
    assert status in (REMOTE_INVALID, REMOTE_OPERATION), f"status: found {status}"


def kernel_atomics(pair):
    pair.host("fill", 0)
    before = pair.host.word()
    pair.post(e.IBV_WR_ATOMIC_FETCH_AND_ADD, 8, atomic=(5, 0))
    expect(pair.status(), SUCCESS)
    expect(pair.word(), before, "original")
    pair.post(e.IBV_WR_ATOMIC_CMP_AND_SWP, 8, atomic=(before + 5, 99))
    expect(pair.status(), SUCCESS)
    expect(pair.word(), before + 5, "original")
    expect(pair.host.word(), 99, "memory")


def soft_atomics(pair):
    pair.mr.write((40).to_bytes(8, "little"), 8)
    pair.host("fetch_add", pair.mr.buf, pair.mr.rkey, 2)
    expect(pair.host.wait()[0], SUCCESS)
    expect(pair.host.word(), 40, "original")
    pair.host("compare_swap", pair.mr.buf, pair.mr.rkey, 42, 7)
    expect(pair.host.wait()[0], SUCCESS)
    expect(pair.host.word(), 42, "original")
    expect(pair.word(), 7, "memory")


SIZED = [kernel_writes, kernel_reads, soft_writes, soft_reads, kernel_sends, soft_sends]
PLAIN = [
    kernel_writes_with_immediate, soft_writes_with_immediate, kernel_waits_for_receive, soft_waits_for_receive,
    kernel_atomics, soft_atomics, soft_lists,
]
REFUSED = [
    kernel_bad_key, soft_bad_key, kernel_out_of_range, soft_out_of_range, kernel_sends_too_much, soft_sends_too_much,
]


def main():
    address, port, gid_index, mtu, loss, *sizes = sys.argv[1:]
    host = Host(address, int(port))
    context = Context(name="rxe0")
    pd, cq = PD(context), CQ(context, 64)
    mr = MR(pd, BYTES, ACCESS)
    own_gid = str(context.query_gid(1, int(gid_index)))
    host_gid = str(ipaddress.ip_address("::ffff:" + address if "." in address else address).exploded)

    def fresh():
        pair = Pair(host, pd, cq, mr, int(gid_index), own_gid, host_gid, int(mtu))
        pair.again = fresh
        return pair

    cases = [(f"{run.__name__}_{count}", lambda pair, run=run, count=int(count): run(pair, count))
             for run in SIZED for count in sizes]
    for name, run in cases + [(run.__name__, run) for run in PLAIN + (REFUSED if loss == "0" else [])]:
        try:
            run(fresh())
            print(f"passed {name}", flush=True)
        except Exception as error:  # one case's trouble is not the next one's
            print(f"failed {name} ({type(error).__name__}: {error})", flush=True)


main()
