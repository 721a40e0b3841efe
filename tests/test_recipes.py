"""The launch recipes, as far as they can be checked without a cluster."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_launch import ROOT

from pipetransformer.config import load_config
from pipetransformer.launch.node import NodeJob, parse_job

RECIPES = ROOT / "docs" / "recipes"
TOOLS = {  # stand-ins for a cluster of two nodes
    "scontrol": 'if [ "$1" = show ]; then printf "node7\\nnode8\\n"; else echo "$@" >> "$LOG"; fi',
    "srun": 'shift; for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@" || exit $?; done',
}


VARIABLES = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "pipetransformer-master-0", "MASTER_PORT": "23456"}


def sbatch(folder: Path, *arguments: str, ended: int = 0) -> tuple[int, list[list[str]], str]:
    """(Exit code, the arguments of run_pipetransformer.sh on each node, what was asked of scontrol)."""
    for name, text in TOOLS.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    (folder / "run_pipetransformer.sh").write_text(
        f'for a in "$@"; do printf "%s\\n" "$a"; done; echo --; exit {ended}\n'
    )
    log = folder / "log"
    log.touch()
    environment = {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "LOG": str(log),
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_JOB_ID": "4321",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
    }
    done = subprocess.run(
        ["bash", str(RECIPES / "slurm.sbatch"), *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )
    launches = [part.split("\n") for part in done.stdout.split("--\n") if part]
    return done.returncode, [[text for text in launch if text] for launch in launches], log.read_text()


def test_slurm_starts_one_launch_a_node(tmp_path: Path) -> None:
    config = str(ROOT / "config" / "train_config_digits_all_in_one.yaml")
    code, launches, asked = sbatch(tmp_path, config, "train.epochs=2", "data.path=/a b")
    assert (code, asked) == (0, "")
    first, second = (parse_job(launch) for launch in launches)
    assert (first.node_rank, second.node_rank) == (0, 1)
    assert (first.num_ranks, first.num_nodes, first.address, first.port) == (8, 2, "node7", 24321)
    assert "data.path=/a b" in first.overrides and "run.resume=auto" in first.overrides
    assert sound(first)


def sound(job: NodeJob) -> bool:
    overrides = [text for text in job.overrides if not text.startswith("data.path")]
    return load_config(job.config, overrides).run.resume == "auto"


def test_slurm_requeues_what_was_told_to_end(tmp_path: Path) -> None:
    code, _, asked = sbatch(tmp_path, "config.yaml", ended=143)
    assert (code, asked) == (143, "requeue 4321\n")
    code, _, asked = sbatch(tmp_path, "config.yaml", ended=1)
    assert (code, asked) == (1, "requeue 4321\n"), "nothing was added"


def test_slurm_without_a_configuration_is_told(tmp_path: Path) -> None:
    code, launches, _ = sbatch(tmp_path)
    assert (code, launches) == (2, [])


def test_the_operator_of_kubernetes_gets_what_it_reads() -> None:
    job: dict[str, Any] = yaml.safe_load((RECIPES / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    nodes = job["spec"]["pytorchReplicaSpecs"]
    assert nodes.keys() == {"Master", "Worker"}
    for node in nodes.values():
        pod = node["template"]["spec"]
        (container,) = pod["containers"]
        assert container["name"] == "pytorch", "the operator looks for this name"
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        (line,) = container["args"]
        words = shlex.split(re.sub(r"\$(\w+)", lambda found: VARIABLES[found[1]], line))
        assert words[:3] == ["exec", "sh", "run_pipetransformer.sh"]
        launched = parse_job(words[3:])
        assert (launched.num_ranks, launched.num_nodes, launched.node_rank) == (8, 2, 1)
        run = load_config(ROOT / launched.config, launched.overrides).run
        assert run.resume == "auto" and run.grace < pod["terminationGracePeriodSeconds"]


def test_the_image_copies_what_is_there() -> None:
    lines = [line for line in (RECIPES / "Dockerfile").read_text().splitlines() if line and not line.startswith("#")]
    assert {line.split()[0] for line in lines} == {"FROM", "WORKDIR", "COPY", "RUN", "ENV", "CMD"}
    for line in lines:
        if line.startswith("COPY"):
            *sources, _ = line.split()[1:]
            assert all((ROOT / source).exists() for source in sources), line


@pytest.mark.parametrize(
    "script", [RECIPES / "slurm.sbatch", ROOT / "run_pipetransformer.sh"], ids=lambda path: path.name
)
def test_scripts_are_sound(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
