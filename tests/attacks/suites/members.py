"""Members that have joined, keep to the protocol where they must, and wait for nobody's good."""

import json
import struct
import threading
import time

from judge import attack, told

import member

HOSTILE = "127.66.6.9"
# Of `digits`: 64 numbers of four bytes.
DIGITS_BYTES = 256
# In the layout `pair`, whichever of the two `digits` is.
MODELS = (0, 1)


def is_linked(scene, frontend, backends=2):
    """Whether all backends reach it, and the scheduler knows."""
    linked = scene.wait_for(lambda: len(frontend.pairs) > backends, 5)
    scene.expect(linked, f"{len(frontend.pairs) - 1} backends have linked to the hostile frontend, expected {backends}")
    time.sleep(0.5)
    return linked


@attack(cluster="pair", limit_s=14, is_last=True)
def credit_miser(scene):
    """A frontend submits 20,000 tasks without an objective, lets its slots be read, acknowledges all that is written
    there, and never grants a credit for more; only its heartbeats come."""
    hostile = member.Frontend(scene.cluster, HOSTILE, receives=8, grants=False)
    if is_linked(scene, hostile):
        hostile.submit(0, 20_000, MODELS, DIGITS_BYTES)
        time.sleep(6)
    scene.expect(hostile.writes > 0, "nothing was written, so nobody had to wait")
    return f"{hostile.reads} reads, {hostile.writes} writes"


@attack(cluster="pair", limit_s=14, is_last=True)
def unanswered_reads(scene):
    """A frontend submits tasks without an objective and answers no READ of them; all else of it is well."""
    hostile = member.Frontend(scene.cluster, HOSTILE, answers_reads=False)
    if is_linked(scene, hostile):
        hostile.submit(0, 4_000, MODELS, DIGITS_BYTES)
        time.sleep(6)
    scene.expect(hostile.reads > 0, "nothing was read, so nobody had to wait")
    return f"{hostile.reads} reads"


@attack(limit_s=20, is_last=True)
def broken_word(scene):
    """A backend hosts a model that nobody else does, and says that it has answered each plan; it writes nothing. Clients
    that would wait for 10 s are told soon."""
    hostile = member.Backend(scene.cluster, HOSTILE, b"slow", 16, 20_000)
    served = scene.wait_for(lambda: scene.cluster.is_model_ready("slow"), 5)
    scene.expect(served, "the hostile backend's model is not served")
    tensor = {"name": "bytes", "shape": [1, 16], "datatype": "UINT8", "data": list(range(16))}
    body = json.dumps({"parameters": {"timeout": 10_000_000}, "inputs": [tensor]}).encode()
    took, statuses = [], []

    def ask():
        began = time.monotonic()
        statuses.append(scene.status("POST", "/v2/models/slow/infer", body, timeout=8))
        took.append(time.monotonic() - began)

    clients = [threading.Thread(target=ask) for _ in range(8)]
    for client in clients:
        client.start()
        time.sleep(0.1)
    for client in clients:
        client.join()
    scene.expect(hostile.plans > 0, "it was given no plan, so nobody had to wait")
    scene.expect(502 in statuses, f"the answers were {told(statuses)}, expected 502 among them")
    scene.expect(max(took) < 2, f"a request was told after {max(took):.1f} s")
    return f"{hostile.plans} plans, {told(statuses)}, at most {max(took):.1f} s"


@attack(limit_s=20, is_last=True)
def slots_of_others(scene):
    """A backend that has joined reads slots of tasks that others run, and writes into them: by each key that it is told,
    those of its link and that of a task of its own, which it keeps."""
    hostile = member.Backend(scene.cluster, HOSTILE, b"slow", 16, 20_000, reports=False)
    served = scene.wait_for(lambda: scene.cluster.is_model_ready("slow"), 5)
    scene.expect(served, "the hostile backend's model is not served")
    tensor = {"name": "bytes", "shape": [1, 16], "datatype": "UINT8", "data": list(range(16))}
    body = json.dumps({"parameters": {"timeout": 3_000_000}, "inputs": [tensor]}).encode()
    threading.Thread(target=scene.status, args=("POST", "/v2/models/slow/infer", body), daemon=True).start()
    scene.expect(scene.wait_for(lambda: hostile.slots, 2), "it was given no task")
    address, arena_bytes, arena_key = struct.unpack_from("<QQI", hostile.arena)
    keys = {"its link's key": arena_key, "the guards' key": struct.unpack_from("<I", hostile.arena[28:].ljust(4))[0]}
    at = 0
    if hostile.slots:
        at, answer_at, own = hostile.slots[0]
        keys["its task's key"] = own
        scene.expect(hostile.reach(False, address + at, own, 16), "it could not read its own task's input")
        scene.expect(hostile.reach(False, address + answer_at, own) is False, "it read the place of an answer")
        scene.expect(hostile.reach(True, address + at, own, 16) is False, "it wrote an input")
    others = address + (at + arena_bytes // 2) % arena_bytes // 64 * 64
    for name, key in keys.items():
        for is_write in (False, True):
            is_done = hostile.reach(is_write, others, key)
            scene.expect(is_done is False, f"{name} {'writes' if is_write else 'reads'} slots of others: {is_done}")
    return f"{hostile.links} links"
