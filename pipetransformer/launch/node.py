"""Start a job, or one node's share of it, under torchrun: the command line of the original PipeTransformer.

    python -m pipetransformer.launch NPROC NNODES NODE_RANK MASTER_ADDR MASTER_PORT CONFIG RUN_ID [key=value ...]

The configuration is checked here, once, before any rank starts. Node 0's RUN_ID names the job.

NNODES may be MIN:MAX, and ``--max-restarts=N`` may stand among the overrides: then torch's elastic agents start the
ranks anew where one fails, on the nodes that are there, and where a node comes; the run goes on from its last
checkpoint.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from argparse import ArgumentTypeError
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipetransformer.config import Config, load_config
from pipetransformer.errors import UserError
from pipetransformer.launch.arguments import count
from pipetransformer.launch.entry import kept_line
from pipetransformer.launch.preflight import check_early
from pipetransformer.launch.rollcall import call_the_roll
from pipetransformer.process import failure, shutdown

if TYPE_CHECKING:
    from pipetransformer.adapter import Rendezvous

RANK = Path(__file__).resolve().parents[1] / "commands" / "rank_scripts" / "train_here.py"
"""The script of a rank."""
USAGE = "NPROC NNODES NODE_RANK MASTER_ADDR MASTER_PORT CONFIG RUN_ID [--max-restarts=N] [key=value ...]"
_RESTARTS = "--max-restarts"
_STOP_SECONDS = 7  # more than ranks give themselves (process.shutdown.GRACE_SECONDS); the whole job has 10


@dataclass(frozen=True, slots=True)
class NodeJob:
    """One node's share of a job.

    Attributes:
        num_ranks: ranks of this node.
        num_nodes: nodes of the job, at most.
        node_rank: number of this node.
        address: name or address of node 0.
        port: port of node 0.
        config: path of the configuration.
        overrides: ``key=value`` texts, the run's id among them.
        min_nodes: nodes of the job at least; None for all.
        max_restarts: how often the ranks are started anew where one fails.
    """

    num_ranks: int
    num_nodes: int
    node_rank: int
    address: str
    port: int
    config: str
    overrides: tuple[str, ...]
    min_nodes: int | None = None
    max_restarts: int = 0

    @property
    def fewest_nodes(self) -> int:
        return self.num_nodes if self.min_nodes is None else self.min_nodes

    @property
    def is_elastic(self) -> bool:
        """Whether ranks may be started anew."""
        return self.max_restarts > 0 or self.fewest_nodes < self.num_nodes


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job and return the exit code: 0, 1 for a failed rank, 2 for a user's mistake, 128 + a signal's number."""
    try:
        job = parse_job(sys.argv[1:] if argv is None else argv)
        return launch_configured(job, load_config(job.config, job.overrides))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def launch_configured(job: NodeJob, config: Config) -> int:
    """Runs the ranks of a job that has this configuration, and returns the exit code. Raises UserError."""
    if job.num_nodes == 1:  # else the others would wait for this one
        check_early(config, num_ranks=job.num_ranks)
    exit_code = launch(
        job,
        entry=RANK,
        settings=config.of_all_nodes,
        timeout_seconds=config.run.timeout,
        saving_seconds=config.run.grace if config.run.on_sigterm == "save" else None,
    )
    if exit_code > 128 and config.run.id is not None and job.node_rank == 0:
        run_dir = Path(config.run.dir).expanduser() / config.run.id
        if run_dir.is_dir():
            print(kept_line(run_dir), file=sys.stderr)
    return exit_code


def parse_job(arguments: Sequence[str]) -> NodeJob:
    if len(arguments) < 7:
        raise UserError(f"{len(arguments)} of 7 arguments; give {USAGE}")
    num_ranks, num_nodes, node_rank, address, port, config, run_id, *overrides = arguments
    if not run_id:
        raise UserError("RUN_ID: it is empty; give the job a name")
    given = {override.partition("=")[0].strip(): override.partition("=")[2] for override in overrides}
    if "run.id" in given:
        raise UserError("run.id: RUN_ID names the run; leave run.id out")
    fewest, colon, most = num_nodes.partition(":")
    nodes = _whole("NNODES", most if colon else fewest, least=1)
    restarts = _whole(_RESTARTS, given[_RESTARTS], least=0) if _RESTARTS in given else 0
    job = NodeJob(
        num_ranks=_whole("NPROC", num_ranks, least=1),
        num_nodes=nodes,
        node_rank=_whole("NODE_RANK", node_rank, least=0, most=nodes - 1),
        address=address,
        port=_whole("MASTER_PORT", port, least=1, most=65535),
        config=config,
        overrides=(),
        min_nodes=_whole("NNODES", fewest, least=1, most=nodes) if colon else None,
        max_restarts=restarts,
    )
    kept = [override for override in overrides if override.partition("=")[0].strip() != _RESTARTS]
    resumes = ["run.resume=auto"] if job.is_elastic and "run.resume" not in given else []
    # quoted: the id 1000 is no number
    return replace(job, overrides=(*kept, *resumes, f"run.id={json.dumps(run_id)}"))


def launch(
    job: NodeJob,
    *,
    entry: Path,
    settings: Mapping[str, object] | None = None,
    timeout_seconds: float = 300.0,
    saving_seconds: float | None = None,
) -> int:
    """Run ``entry CONFIG [key=value ...]`` as the ranks of this node; a failed job's last line is its first cause.

    Args:
        entry: script of the ranks.
        settings: settings that are the same on all nodes (``Config.of_all_nodes``).
        timeout_seconds: longest wait of nodes for each other before ranks start.
        saving_seconds: time that ranks have to save after a SIGTERM; None where they do not save.
    """
    _check_address(job)
    prepare_ranks(job.num_ranks)
    saving_seconds = _STOP_SECONDS if saving_seconds is None else saving_seconds + _STOP_SECONDS
    try:
        with shutdown.installed(grace_seconds=saving_seconds + 1):
            if job.num_nodes > 1 and not job.is_elastic:  # else torch's rendezvous waits for nodes, as they come
                call_the_roll(job, settings=settings or {}, timeout_seconds=timeout_seconds)
            return _run(job, entry=entry, saving_seconds=saving_seconds, timeout_seconds=timeout_seconds)
    except shutdown.Interrupted as interrupted:
        print(f"interrupted by {interrupted.signal.name}", file=sys.stderr)
        return interrupted.exit_code


def prepare_ranks(num_ranks: int) -> None:
    """Sets the environment for ranks of this machine: one thread each where there are several."""
    if num_ranks > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a lost connection is no news while a job ends


def free_port() -> int:
    """A port without a listener now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _run(job: NodeJob, *, entry: Path, saving_seconds: float, timeout_seconds: float) -> int:
    from pipetransformer.adapter import run_ranks  # imports torch: only once the configuration is known to be sound

    ends = run_ranks(
        entry,
        [job.config, *job.overrides],
        num_ranks=job.num_ranks,
        rendezvous=_rendezvous(job, timeout_seconds=timeout_seconds),
        max_restarts=job.max_restarts,
        stop_seconds=_STOP_SECONDS,
        saving_seconds=saving_seconds,
    )
    if not ends:
        return 0
    cause = failure.first_cause(ends)
    print(f"{cause.details}{cause.line}", file=sys.stderr)
    return 1


def _rendezvous(job: NodeJob, *, timeout_seconds: float) -> Rendezvous:
    from pipetransformer.adapter import Rendezvous

    if job.num_nodes == 1:
        return Rendezvous.on_loopback(job.port)
    place = f"{job.address}:{job.port}"
    if not job.is_elastic:
        return Rendezvous.of_fixed_nodes(place, num_nodes=job.num_nodes, node_rank=job.node_rank)
    return Rendezvous.of_nodes_that_come_and_go(
        place,
        name=json.loads(job.overrides[-1].partition("=")[2]),
        fewest=job.fewest_nodes,
        most=job.num_nodes,
        is_host=job.node_rank == 0,
        timeout_seconds=timeout_seconds,
    )


def _whole(name: str, text: str, *, least: int, most: int | None = None) -> int:
    try:
        return count(text, least=least, most=most)
    except ArgumentTypeError as error:
        raise UserError(f"{name}: {error}") from None


def _check_address(job: NodeJob) -> None:
    try:
        socket.getaddrinfo(job.address, job.port)
    except OSError:
        raise UserError(f"MASTER_ADDR: {job.address} is not a known host; give node 0's name or address") from None
    if job.node_rank > 0:
        return
    both = socket.has_dualstack_ipv6() and job.num_nodes > 1
    family, host = socket.AF_INET6 if both else socket.AF_INET, "" if job.num_nodes > 1 else "127.0.0.1"
    try:
        socket.create_server((host, job.port), family=family, dualstack_ipv6=both).close()
    except PermissionError:
        raise UserError(f"MASTER_PORT: {job.port} is not open to this user; give one above 1023") from None
    except OSError:
        raise UserError(f"MASTER_PORT: {job.port} is in use; give another") from None
