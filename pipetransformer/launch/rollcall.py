"""The roll call of nodes before torchrun starts: all must answer, and mean the same job.

torchrun itself waits without a word and names nobody. Here node 0 opens torch's own store on MASTER_PORT, every node
signs in, and a node that is missing, twice there or of another mind is named on every node within ``run.timeout``.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from pipetransformer.errors import UserError

if TYPE_CHECKING:
    from pipetransformer.launch.node import NodeJob

_POLL_SECONDS = 0.1  # between looks, so that a signal ends the wait
_REPLY_SECONDS = 30.0
_SETTLE_SECONDS = 1.0
_ROLL_SECONDS = 5.0


def call_the_roll(job: NodeJob, *, settings: Mapping[str, object], timeout_seconds: float) -> None:
    """Waits until all nodes of the job have signed in; nothing is left open.

    Args:
        settings: settings that must be the same on all nodes, by key; plain values.

    Raises:
        UserError: on every present node, naming the mistake.
    """
    from torch.distributed import DistError

    place = f"{job.address}:{job.port}"
    within = f"within run.timeout ({timeout_seconds:g} s)"
    deadline = time.monotonic() + timeout_seconds
    if job.node_rank == 0:
        print(f"waiting for {job.num_nodes - 1} more of {job.num_nodes} nodes at {place} ...", flush=True)
    elif not _until(lambda: _is_answered(job), deadline=deadline):
        raise UserError(f"MASTER_ADDR: node 0 did not answer at {place} {within}")
    sign = {"NNODES": job.num_nodes, "NPROC": job.num_ranks, **settings}
    try:
        verdict = _answer(job, sign=json.dumps(sign), deadline=deadline, within=within)
    except DistError as error:
        raise UserError(f"MASTER_ADDR: node 0 at {place} went away before all nodes were there") from error
    if verdict:
        raise UserError(verdict)
    if job.node_rank > 0:
        print(f"node {job.node_rank} of {job.num_nodes}: all are there; node 0 tells how the job goes", flush=True)
        # Node 0's store must be gone from the port before torchrun connects to its own.
        time.sleep(_SETTLE_SECONDS)


def _answer(job: NodeJob, *, sign: str, deadline: float, within: str) -> str:
    """Signs in and returns node 0's verdict, empty where all is well. The store is gone afterwards."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    node = job.node_rank
    store = TCPStore(
        job.address, job.port, is_master=node == 0, wait_for_workers=False, timeout=timedelta(seconds=_REPLY_SECONDS)
    )
    if node == 0:
        store.set("roll", "called")
    elif not _until(lambda: store.check(["roll"]), deadline=time.monotonic() + _ROLL_SECONDS):
        raise UserError(
            f"MASTER_PORT: another job is at {job.address}:{job.port} already; give another port, or look for "
            f"a node that says it is node {node}, too"
        )
    if store.add(f"signed/{node}", 1) > 1:
        store.set("twice", str(node))
    store.set(_key(node), sign)
    if node > 0:
        store.add("others", 1)
        _until(lambda: store.check(["verdict"]), deadline=deadline + _REPLY_SECONDS)
        # A node that node 0 does not count on looks for itself.
        told: str = store.get("verdict").decode() or _difference(store, node)
        store.add("read", 1)
        return told
    verdict = _verdict(store, num_nodes=job.num_nodes, deadline=deadline, within=within)
    store.set("verdict", verdict)
    _until(lambda: store.add("read", 0) >= store.add("others", 0), deadline=time.monotonic() + _REPLY_SECONDS)
    return verdict


def _key(node: int) -> str:
    return f"node/{node}"


def _verdict(store: Any, *, num_nodes: int, deadline: float, within: str) -> str:
    """The mistake that node 0 finds, or nothing."""
    missing = list(range(1, num_nodes))
    complete_at = 0.0
    while True:
        if store.check(["twice"]):
            return f"NODE_RANK: two nodes say that they are node {store.get('twice').decode()}; number them from 0"
        for node in [n for n in missing if store.check([_key(n)])]:
            missing.remove(node)
            if difference := _difference(store, node):
                return difference
        if not missing:
            complete_at = complete_at or time.monotonic()
            if time.monotonic() > complete_at + _SETTLE_SECONDS:  # a second node of one number may be a moment late
                return ""
        elif time.monotonic() > deadline:
            names = ", ".join(map(str, missing))
            return f"NNODES: node {names} of {num_nodes} did not come {within}; start it, or give fewer nodes"
        time.sleep(_POLL_SECONDS)


def _difference(store: Any, node: int) -> str:
    """The first difference between ``node`` and node 0, or nothing."""
    own, told = (json.loads(store.get(_key(n))) for n in (0, node))
    for name in own:
        if told.get(name) != own[name]:
            return f"{name}: node {node} says {told.get(name)} and node 0 {own[name]}; give all the same"
    return ""


def _is_answered(job: NodeJob) -> bool:
    """Whether someone listens at node 0's address."""
    with contextlib.suppress(OSError), socket.create_connection((job.address, job.port), timeout=1.0):
        return True
    return False


def _until(condition: Callable[[], bool], *, deadline: float) -> bool:
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True
