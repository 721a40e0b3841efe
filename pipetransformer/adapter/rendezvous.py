"""The meeting of a job's launchers, by torch's elastic agents: on one node, on fixed ones, on ones that come and go."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipetransformer.process.failure import RankEnd, first_cause, read_report

_LOOPBACK, _NAME = "127.0.0.1", "loopback"
_LAST_CALL_SECONDS = 10  # for more nodes, once the fewest are there
_BEAT_SECONDS, _BEATS = 2, 3  # of a node that is alive; so many missed ones, and it counts as gone


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """A way of meeting.

    Attributes:
        flags: torchrun's, with their values.
        obstacle: what a user reads where it fails.
    """

    flags: Mapping[str, object]
    obstacle: str

    @classmethod
    def on_loopback(cls, port: int) -> Rendezvous:
        """Of one node, that no other machine can reach.

        Note: the store of torchrun's own listens on all interfaces, whatever address it is given.
        """
        _register_loopback(port)
        flags = {"--rdzv-backend": _NAME, "--rdzv-endpoint": f"{_LOOPBACK}:{port}", "--nnodes": 1}
        return cls(flags, f"MASTER_PORT: the ranks could not meet at port {port}; give another")

    @classmethod
    def of_fixed_nodes(cls, place: str, *, num_nodes: int, node_rank: int) -> Rendezvous:
        address, _, port = place.rpartition(":")
        flags = {"--master-addr": address, "--master-port": port, "--nnodes": num_nodes, "--node-rank": node_rank}
        return cls(flags, f"MASTER_ADDR: the nodes could not meet at {place}; look at the network between them")

    @classmethod
    def of_nodes_that_come_and_go(
        cls, place: str, *, name: str, fewest: int, most: int, is_host: bool, timeout_seconds: float
    ) -> Rendezvous:
        """Of as many nodes as are there, at least ``fewest``.

        Note: where launchers share their store with the ranks, as is torch's way, rank 0's tells its place at the first
        meeting alone, and a node that comes later waits for it in vain.

        Args:
            name: of the job, the same on all nodes.
            is_host: whether this node has the store, which must stay.
        """
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        settings = {
            "is_host": is_host,
            "last_call_timeout": _LAST_CALL_SECONDS,
            "keep_alive_interval": _BEAT_SECONDS,
            "keep_alive_max_attempt": _BEATS,
            "join_timeout": round(timeout_seconds),
            "timeout": round(timeout_seconds),
        }
        flags = {
            "--rdzv-backend": "c10d",
            "--rdzv-endpoint": place,
            "--rdzv-id": name,
            "--rdzv-conf": ",".join(f"{key}={value}" for key, value in settings.items()),
            "--nnodes": f"{fewest}:{most}",
        }
        return cls(
            flags,
            f"NNODES: fewer than {fewest} nodes met at {place} within run.timeout ({timeout_seconds:g} s); start them, "
            "node 0 among them, or give fewer",
        )


def _register_loopback(port: int) -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import handler_registry  # type: ignore[attr-defined]
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    class OnLoopback(StaticTCPRendezvous):
        def get_backend(self) -> str:
            return _NAME

        def next_rendezvous(self) -> RendezvousInfo:
            if not self._store:
                listener = socket.create_server((_LOOPBACK, self.master_port))
                self._store = TCPStore(
                    *(_LOOPBACK, self.master_port, self.world_size, True, self.timeout),
                    multi_tenant=True,
                    master_listen_fd=listener.detach(),
                )
            return super().next_rendezvous()

    def made(parameters: RendezvousParameters) -> RendezvousHandler:
        return OnLoopback(_LOOPBACK, port, 0, 1, parameters.run_id, 600)

    handler_registry._registry[_NAME] = made  # Note: ``register`` refuses a second job in this process.


def ends_of(failures: Mapping[int, Any]) -> dict[int, RankEnd]:
    """How ranks ended, from torchrun's records of those that failed."""
    return {
        rank: RankEnd(exit_code=failure.exitcode, time=failure.timestamp, report=read_report(failure.message))
        for rank, failure in failures.items()
    }


def tell_restarts(most: int) -> None:
    """Has this process's agent say why it starts its ranks anew. Torch's own log is silent here."""
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    restart = getattr(LocalElasticAgent._restart_workers, "__wrapped__", LocalElasticAgent._restart_workers)

    @functools.wraps(restart)
    def tell_and_restart(self: Any, *args: Any, **kwargs: Any) -> None:
        context = self._pcontext
        failures = {self._worker_group.workers[local].global_rank: f for local, f in context._failures.items()}
        cause = first_cause(ends_of(failures)).line if failures else "nodes have come or gone"
        left = f"{self._remaining_restarts} of {most} restarts are left"
        print(f"{cause}; the ranks start anew ({left})", flush=True)
        restart(self, *args, **kwargs)

    LocalElasticAgent._restart_workers = tell_and_restart  # type: ignore[method-assign]
