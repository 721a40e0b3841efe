"""Show the plan that a job would take for every number of frozen blocks, and what it predicts of each."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.table import Table

from pipetransformer.commands.ranks import local_ranks, run_script
from pipetransformer.commands.tables import make_console, make_table
from pipetransformer.config import Config, load_config
from pipetransformer.errors import UserError
from pipetransformer.launch.arguments import count
from pipetransformer.pipe.measure.profile import costs_key
from pipetransformer.pipe.measure.profile_file import Profile, load_profile, save_profile
from pipetransformer.pipe.measure.shapes import Hardware, profile_of_shapes
from pipetransformer.pipe.measure.units import Speeds
from pipetransformer.pipe.planner.checks import check_layout
from pipetransformer.pipe.planner.choice import Planner
from pipetransformer.pipe.planner.search import Prediction
from pipetransformer.simulation.schema import Cluster, load_cluster


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="YAML file of a training")
    parser.add_argument("overrides", metavar="key=value", nargs="*", default=[], help="override, e.g. train.epochs=3")
    parser.add_argument("--world-size", type=count, metavar="N", help="ranks of the job; the devices here if not given")
    parser.add_argument("--gpus-per-node", type=count, metavar="G", help="ranks of a node; all of them if not given")
    parser.add_argument(
        "--profile", type=Path, metavar="FILE", help="costs measured elsewhere; measured here if not given"
    )
    parser.add_argument(
        "--cluster",
        type=Path,
        metavar="FILE",
        help="plan for the machines of this file (its section cluster, as in config/simulation_1024.yaml) from the "
        "model's shapes alone: nothing is loaded or timed",
    )
    parser.add_argument("--save-profile", type=Path, metavar="FILE", help="keep what was measured here")


def run(arguments: argparse.Namespace) -> None:
    config = load_config(arguments.config, arguments.overrides)
    if arguments.cluster is not None:
        _of_shapes(config, arguments)
        return
    world_size = arguments.world_size or local_ranks()
    local_size = arguments.gpus_per_node or world_size
    if world_size % local_size:
        raise UserError(f"--gpus-per-node: {local_size} does not divide the {world_size} ranks; give a divisor")
    if arguments.profile is not None:
        profile = load_profile(arguments.profile)
    else:
        profile = _measured(arguments, world_size=world_size, local_size=local_size)
    if world_size > profile.job.num_ranks == 1:
        raise UserError(
            "--world-size: costs measured on one rank tell nothing of links; give --profile with one of several ranks"
        )
    if local_size > 1 and profile.key.get("nodes", 1) == profile.job.num_ranks > 1:
        raise UserError(
            "--gpus-per-node: costs measured with one rank a node tell nothing of links inside one; give --profile of "
            "several ranks a node"
        )
    _check(profile, config, arguments)
    check_layout(
        config,
        world_size=world_size,
        local_size=local_size,
        num_units=len(profile.job.parameter_bytes),
    )
    if arguments.save_profile is not None:
        save_profile(profile, arguments.save_profile, key="--save-profile")
        print(f"costs saved in {arguments.save_profile}", file=sys.stderr)
    console = make_console()
    measured_on = profile.key.get("device"), profile.key.get("ranks"), profile.key.get("torch")
    console.print("costs measured on {}, {} ranks, torch {}".format(*measured_on))
    if world_size > local_size and profile.job.between is None:
        console.print("the link between nodes was not measured, and is taken to be as fast as those inside a node")
    rows = plans(config, profile, world_size=world_size, local_size=local_size)
    console.print(_table(rows))


def _of_shapes(config: Config, arguments: argparse.Namespace) -> None:
    for name in ("world_size", "gpus_per_node", "profile"):
        if getattr(arguments, name) is not None:
            raise UserError(
                f"--{name.replace('_', '-')}: has no effect with --cluster, whose file says it; leave it out"
            )
    cluster = load_cluster(arguments.cluster)
    world_size, local_size = cluster.nodes * cluster.devices_per_node, cluster.devices_per_node
    if cluster.nodes > 1 and cluster.between is None:
        raise UserError("cluster.between: missing; give the link of a node to others")
    profile = profile_of_shapes(config, hardware_of(cluster), num_ranks=world_size)
    num_units = len(profile.job.parameter_bytes)
    check_layout(config, world_size=world_size, local_size=local_size, num_units=num_units)
    if arguments.save_profile is not None:
        save_profile(profile, arguments.save_profile, key="--save-profile")
    console, weights = make_console(), sum(profile.job.parameter_bytes) / 4  # in float32
    told = f"{weights / 1e9:,.2f} billion" if weights >= 1e9 else f"{weights / 1e6:,.2f} million"
    console.print(f"{told} weights; costs counted from shapes, speeds as {arguments.cluster} says")
    console.print(_table(plans(config, profile, world_size=world_size, local_size=local_size)))


def hardware_of(cluster: Cluster) -> Hardware:
    """Speeds and links of a cluster's devices."""
    return Hardware(
        Speeds(1e9 / cluster.operations_per_second, 1e9 / cluster.memory_bytes_per_second),
        inside=cluster.inside.link(),
        between=cluster.between.link() if cluster.between is not None and cluster.nodes > 1 else None,
        host=cluster.host.link(),
        overlap=cluster.overlap,
        memory=cluster.memory,
    )


def plans(config: Config, profile: Profile, *, world_size: int, local_size: int) -> tuple[Prediction, ...]:
    """By n: the plan that the job would take if the rest of its run went on with n frozen blocks.

    Raises:
        UserError: where no plan of the unfrozen model fits.
    """
    costs = profile.job.for_ranks(world_size)
    num_blocks = (len(costs.parameter_bytes) - 2) // config.pipe.units_per_block
    planner = Planner.of(
        config,
        num_blocks=num_blocks,
        world_size=world_size,
        local_size=local_size,
        device_memory=profile.device_memory,
    )
    return planner.steady_plans(costs, has_cache=config.cache.enabled)


def _check(profile: Profile, config: Config, arguments: argparse.Namespace) -> None:
    """Refuses costs of something else than ``config``."""
    # Decided where the costs are measured.
    if config.train.precision == "auto":
        config = config.with_overrides({"train.precision": profile.key.get("precision", "float32")})
    if config.train.wide_attention == "auto":
        config = config.with_overrides({"train.wide_attention": profile.key.get("wide_attention", 0)})
    for name, wanted in costs_key(config).items():
        measured = profile.key.get(name, wanted)
        if measured != wanted:
            measured, wanted = _different(measured, wanted)
            raise UserError(
                f"--profile: {arguments.profile} was measured with {name} {measured}, and "
                f"{arguments.config} says {wanted}; measure it anew with --save-profile"
            )


def _different(first: object, second: object) -> tuple[object, object]:
    """Of two mappings only what they do not share."""
    if not (isinstance(first, dict) and isinstance(second, dict)):
        return first, second
    unlike = [key for key in {**first, **second} if first.get(key) != second.get(key)]
    return {key: first.get(key) for key in unlike}, {key: second.get(key) for key in unlike}


def _measured(arguments: argparse.Namespace, *, world_size: int, local_size: int) -> Profile:
    """Costs of this machine's devices, by real ranks and real sends between them."""
    num_ranks = min(local_ranks(), world_size)
    print(f"measuring on {num_ranks} rank(s) of this machine", file=sys.stderr)
    return run_script(
        "measure_costs",
        [str(world_size), str(local_size), arguments.config, *arguments.overrides],
        num_ranks=num_ranks,
        read=load_profile,
    )


def _table(rows: tuple[Prediction, ...]) -> Table:
    titles = ("frozen", "pp x dp", "schedule", "M", "boundaries", "cache", "prefix", "step ms", "MB by rank", "idle %")
    return make_table(titles, map(_row, rows), left=["schedule", "boundaries", "prefix"])


def _row(prediction: Prediction) -> tuple[str, ...]:
    plan = prediction.plan
    return (
        str(plan.frozen),
        f"{plan.pp} x {plan.dp}",
        plan.schedule if plan.pp > 1 else "-",
        str(plan.num_microbatches),
        ", ".join(map(str, plan.boundaries)) or "-",
        "-" if plan.cached is None else str(plan.cached),
        plan.prefix if plan.frozen else "-",
        f"{prediction.step_seconds * 1e3:,.1f}",
        ", ".join(f"{num_bytes / 1e6:,.0f}" for num_bytes in prediction.memory_bytes),
        f"{100 * prediction.bubble:.0f}",
    )
