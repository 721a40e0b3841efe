"""Train as a configuration says, on ranks of this machine.

CONFIG is a YAML file, or the name of a shipped one ('pipetransformer configs' lists them). A key=value sets any key of
docs/config.md; 'pipetransformer configs --keys' prints them. Several nodes: run_pipetransformer.sh, or torchrun.
"""

from __future__ import annotations

import argparse
from datetime import datetime

from pipetransformer.config import load_config
from pipetransformer.config.shipped import without_freezing
from pipetransformer.errors import UserError
from pipetransformer.launch.arguments import count
from pipetransformer.launch.node import NodeJob, free_port, launch_configured

EXAMPLES = """examples:
  pipetransformer train digits                                    handwritten digits: minutes on two cores
  pipetransformer train digits --no-freeze                        its twin without freezing
  pipetransformer train sst2 data.path=SST-2 --ranks 8 run.id=1000
  pipetransformer train table data.path=FOLDER 'data.text_columns=[question]' data.label_column=topic
  pipetransformer train image_folder data.path=PICTURES model.name=vit_small_patch16_224
  pipetransformer train mine.yaml run.id=1000 run.resume=true     go on where it stopped

keys (a section has more):
  model.name, model.kwargs, model.lora.r       what is trained: timm's or transformers' names, or a folder
  data.name, data.path                         what it is trained on
  train.epochs, .lr, .batch_size, .precision   how
  freeze.policy: guarded, none, static, schedule, paper, percentile, plasticity, top_down, or your own
  pipe.initial_length, dp.enabled, cache.enabled, checkpoint.every, log.wandb, run.id, run.dir

models: ViT, DeiT, BEiT, EVA of timm; BERT, RoBERTa, ELECTRA, DistilBERT, ModernBERT, GPT-2, OPT, Llama, Mistral, Qwen2,
Qwen3 of transformers, and what is built like them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="YAML file, or the name of a shipped one")
    parser.add_argument("overrides", metavar="key=value", nargs="*", default=[], help="setting, e.g. train.epochs=3")
    parser.add_argument("--ranks", type=count, metavar="N", help="processes; one a GPU, or 1, if not given")
    parser.add_argument("--no-freeze", action="store_true", help="the twin of a shipped configuration without freezing")
    parser.add_argument("--max-restarts", type=_restarts, default=0, metavar="N", help="start failed ranks anew")


def run(arguments: argparse.Namespace) -> int:
    """Returns the exit code of the job."""
    if wrong := next((text for text in arguments.overrides if "=" not in text), None):
        raise UserError(
            f"{wrong}: settings are key=value; quote what has spaces or brackets: 'data.text_columns=[a, b]'"
        )
    name = without_freezing(arguments.config) if arguments.no_freeze else arguments.config
    config = load_config(name, arguments.overrides)
    if arguments.no_freeze and config.freeze.policy != "none":
        raise UserError(f"--no-freeze: freeze.policy={config.freeze.policy} may freeze blocks; give one of both")
    resumes = ["run.resume=auto"] if arguments.max_restarts else []
    if arguments.max_restarts and config.run.id is None:  # each start must find what the one before has left
        resumes.append(f'run.id="{datetime.now():%Y%m%d-%H%M%S}"')
    job = NodeJob(
        num_ranks=arguments.ranks or _devices(),
        num_nodes=1,
        node_rank=0,
        address="127.0.0.1",
        port=free_port(),
        config=name,
        overrides=(*resumes, *arguments.overrides),
        max_restarts=arguments.max_restarts,
    )
    return launch_configured(job, config)


def _restarts(text: str) -> int:
    return count(text, least=0)


def _devices() -> int:
    import torch

    return torch.cuda.device_count() or 1
