"""Plans for models larger than any device: Llama 70B and a ViT of 22 billion weights on 64 and on 1,024 GPUs.

    pipetransformer bench large-plans

Nothing is loaded and no GPU is needed: shapes are counted, speeds are those of config/plan_64_gpus.yaml; 1,024 GPUs are
16 times as many of its nodes. For each model, number of GPUs and way to share out among replicas, the plan that a job
would take with nothing, half, and all but one of its blocks frozen and cached; none where none fits.

Assumed: operations at half of a GPU's best, memory and links at the file's speeds; weights, gradients and moments in
float32 (16 bytes a weight), activations in bfloat16, all of them recomputed; 72 GB of a GPU's memory for plans.
"""

from __future__ import annotations

import sys
from time import perf_counter

from matplotlib.figure import Figure

from benchmarks.support.command_line import add_output, bench_parser
from benchmarks.support.measure import CONFIGS
from benchmarks.support.table import Row, write_table
from pipetransformer.commands.plan import hardware_of
from pipetransformer.config import Config, load_config
from pipetransformer.launch.entry import run_guarded
from pipetransformer.pipe.measure.profile_file import Profile
from pipetransformer.pipe.measure.shapes import profile_of_shapes
from pipetransformer.pipe.planner.choice import Planner
from pipetransformer.plan import SHARDS
from pipetransformer.simulation.schema import Cluster, load_cluster

MODELS = {"Llama 70B": "plan_llama_70b.yaml", "ViT 22B": "plan_vit_22b.yaml"}
NODES = (8, 128)


def main() -> None:
    parser = bench_parser("large-plans", description=__doc__)
    add_output(parser)
    arguments = parser.parse_args()
    cluster, rows = load_cluster(CONFIGS / "plan_64_gpus.yaml"), list[Row]()
    for model, file in MODELS.items():
        config = load_config(CONFIGS / file)
        for nodes in NODES:
            began = perf_counter()
            machines = cluster.model_copy(update={"nodes": nodes})
            profile = profile_of_shapes(config, hardware_of(machines), num_ranks=nodes * cluster.devices_per_node)
            counted = perf_counter() - began
            for shard in SHARDS:
                rows += rows_of(model, config.with_overrides({"dp.shard": shard}), profile, machines, seconds=counted)
                print(rows[-1], flush=True)
    notes = [
        "A step is of the global batch of the file, 1,024 texts of 2,048 tokens and 4,096 pictures of 224 pixels. GB: "
        "the most of any GPU. Seconds: counting the shapes, and planning a row, on one core.",
    ]
    title = "Plans for models larger than a device, from shapes alone"
    write_table(
        "large-plans", rows, title=title, notes=notes, draw=lambda figure: draw(figure, rows), folder=arguments.output
    )


def rows_of(model: str, config: Config, profile: Profile, cluster: Cluster, *, seconds: float) -> list[Row]:
    world_size, local_size = cluster.nodes * cluster.devices_per_node, cluster.devices_per_node
    costs, num_blocks = profile.job.for_ranks(world_size), len(profile.job.parameter_bytes) - 2
    planner = Planner.of(
        config, num_blocks=num_blocks, world_size=world_size, local_size=local_size, device_memory=profile.device_memory
    )
    found: list[Row] = []
    for frozen in (0, num_blocks // 2, num_blocks - 1):
        began = perf_counter()
        prediction = planner.steady_plan(frozen, costs, has_cache=True)
        plan = None if prediction is None else prediction.plan
        found.append(
            {
                "model": model,
                "weights, billions": sum(costs.parameter_bytes) / 4e9,
                "GPUs": world_size,
                "shared out": config.dp.shard,
                "frozen": f"{frozen} of {num_blocks}",
                "pp x dp": None if plan is None else f"{plan.pp} x {plan.dp}",
                "M": None if plan is None else plan.num_microbatches,
                "prefix": None if plan is None or not frozen else plan.prefix,
                "step s": None if prediction is None else prediction.step_seconds,
                "GB": None if prediction is None else max(prediction.memory_bytes) / 1e9,
                "counted in s": seconds,
                "planned in s": perf_counter() - began,
            }
        )
    return found


def draw(figure: Figure, rows: list[Row]) -> None:
    axes = figure.subplots()
    for number, model in enumerate(MODELS):
        for gpus, marker in zip(dict.fromkeys(row["GPUs"] for row in rows), "os^"):
            own = [row for row in rows if row["model"] == model and row["GPUs"] == gpus and row["step s"] is not None]
            label = f"{model}, {gpus:,} GPUs"
            axes.scatter(
                [row["GB"] for row in own],
                [row["step s"] for row in own],
                color=f"C{number}",
                marker=marker,
                label=label,
            )
    axes.set(xlabel="GB of the GPU with the most", ylabel="seconds of a step", yscale="log")
    axes.legend()


if __name__ == "__main__":
    sys.exit(run_guarded(main))
