"""The paper's elastic run beside ours, an assumption at a time.

Only reading is fitted on a row of the table, that of alpha 1/2, which it therefore is no check of.

planned      our planner, free after the first freeze, at the rate of the paper's development notes
halving      the pipeline halves as the paper's does
rate         and the GPUs attain what the run without freezing shows, which each row's gain is over
evaluation   and the test set is run after every epoch, the same way with and without freezing
reading      and no machine reads pictures faster than the fastest published run shows at least
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.support.measure import CONFIGS
from pipetransformer.pipe.planner.answers import Choice, Outlook
from pipetransformer.pipe.planner.choice import Planner
from pipetransformer.plan import ParallelPlan
from pipetransformer.simulation.analytic import costs_of
from pipetransformer.simulation.run import run_simulation
from pipetransformer.simulation.schema import SimulationConfig, load_simulation

__all__ = ["ASSUMPTIONS", "FREE", "STATIC", "Assumption", "Halving", "fitted_rate", "seconds"]

FREE = "pipe.initial_length=null"
STATIC = ("freeze.alpha=0.0", "pipe.cache=false", "pipe.elastic=false", "pipe.replicas=false")
_FITS = 6  # steps of the fixed point; each takes what does not depend on the rate to its own share


@dataclass(frozen=True, slots=True)
class Assumption:
    """How a run is simulated.

    Attributes:
        halves: whether the pipeline halves; else the planner chooses its length.
        fits_rate: whether the attained rate is that of the published run without freezing.
        evaluates: whether the test set is run after every epoch.
        reads: whether reading bounds the samples per second.
    """

    name: str
    halves: bool = False
    fits_rate: bool = False
    evaluates: bool = False
    reads: bool = False


ASSUMPTIONS = (
    Assumption("planned"),
    Assumption("halving", halves=True),
    Assumption("rate", halves=True, fits_rate=True),
    Assumption("evaluation", halves=True, fits_rate=True, evaluates=True),
    Assumption("reading", halves=True, fits_rate=True, evaluates=True, reads=True),
)


@dataclass(frozen=True)
class Halving(Planner):
    """As the paper's AutoPipe: the pipeline halves as long as no rank has more active blocks than at the start."""

    def next_plan(
        self,
        frozen: int,
        *,
        cached_options: Mapping[int | None, float],
        current: ParallelPlan,
        outlook: Outlook,
    ) -> Choice | None:
        if self.keeps_length or self.keeps_cut:
            return super().next_plan(frozen, cached_options=cached_options, current=current, outlook=outlook)
        (start,) = self.first.pipeline_lengths
        length, active = start, self.num_blocks - frozen
        while length % 2 == 0 and 2 * active * start <= self.num_blocks * length:
            length //= 2
        constraints = replace(self.first, pipeline_lengths=(length,))
        return self._choose(frozen, cached_options, constraints, outlook, current)


def seconds(
    name: str,
    overrides: Sequence[str],
    *,
    assumption: Assumption,
    test_samples: int,
    samples_per_s: float | None = None,
    rate: float | None = None,
) -> float:
    """Of the run that ``config/simulation_paper_NAME.yaml`` describes.

    Args:
        overrides: of the file.
        test_samples: run after each epoch, where the assumption has that.
        samples_per_s: that reading gives all machines together, where the assumption has that; None: no bound.
        rate: operations per second of a device; None: the file's.
    """
    if rate is not None:
        overrides = [*overrides, f"cluster.operations_per_second={rate}"]
    config = load_simulation(CONFIGS / f"simulation_paper_{name}.yaml", overrides)
    keeps_length = config.pipe.initial_length is None  # nothing to halve: the best static layout
    planning = Halving if assumption.halves and not keeps_length else Planner
    slowest = config.train.batch_size / samples_per_s if samples_per_s and assumption.reads else 0.0
    evaluation = _evaluation(config, test_samples) if assumption.evaluates else 0.0
    return sum(
        segment.num_steps * max(segment.prediction.step_seconds, slowest)
        + segment.num_epochs * evaluation
        + segment.transition_seconds
        + segment.advance_seconds
        for segment in run_simulation(config, planning=planning)
    )


def _evaluation(config: SimulationConfig, samples: int) -> float:
    """Seconds of the forward of ``samples``, on all ranks alike."""
    (of_batch,) = costs_of(config).by_rows.values()
    return samples / config.train.batch_size * sum(of_batch.forward_ns) / 1e9


def fitted_rate(name: str, published_s: float, *, assumption: Assumption, test_samples: int) -> float:
    """Operations per second at which the run without freezing takes ``published_s``."""
    rate = load_simulation(CONFIGS / f"simulation_paper_{name}.yaml").cluster.operations_per_second
    for _ in range(_FITS):
        rate *= seconds(name, STATIC, assumption=assumption, test_samples=test_samples, rate=rate) / published_s
    return rate
