"""Every private or version-dependent call into torch, each with its reason. Supported: torch 2.11 to the newest."""

from pipetransformer.adapter.attention import WideAttention, attentions
from pipetransformer.adapter.behaviour import keeps_boundaries, sends_without_gradients
from pipetransformer.adapter.checkpoints import CheckpointException, load_tensors, save_tensors
from pipetransformer.adapter.deferred import Deferred, NotDeferred
from pipetransformer.adapter.export import block_call, export, export_failure, module_call, requires_grad
from pipetransformer.adapter.fake import shapes_alone
from pipetransformer.adapter.groups import group_among, patient_group
from pipetransformer.adapter.launch import is_peer_failure, run_ranks, silent_nodes
from pipetransformer.adapter.memory import LiveBytes, give_memory
from pipetransformer.adapter.operators import aliases, has_random_tag, is_assertion, is_light, written
from pipetransformer.adapter.pipelining import Schedule, StagePart, build_schedule, run_schedule
from pipetransformer.adapter.recomputation import MODES, Recompute, kept_bytes, product_bytes
from pipetransformer.adapter.rendezvous import Rendezvous
from pipetransformer.adapter.split import bytes_between_halves
from pipetransformer.adapter.stage import Span, StageTimes
from pipetransformer.adapter.tensors import (
    belongs_to_parameter,
    divide,
    gradient_norms,
    rows_of,
    scaled_step,
    storage_of,
)

__all__ = [
    "CheckpointException",
    "Deferred",
    "LiveBytes",
    "MODES",
    "NotDeferred",
    "Recompute",
    "Schedule",
    "Span",
    "StagePart",
    "StageTimes",
    "WideAttention",
    "aliases",
    "attentions",
    "belongs_to_parameter",
    "block_call",
    "build_schedule",
    "bytes_between_halves",
    "divide",
    "export",
    "export_failure",
    "give_memory",
    "gradient_norms",
    "group_among",
    "has_random_tag",
    "is_assertion",
    "is_light",
    "is_peer_failure",
    "keeps_boundaries",
    "kept_bytes",
    "load_tensors",
    "module_call",
    "patient_group",
    "product_bytes",
    "requires_grad",
    "Rendezvous",
    "run_ranks",
    "run_schedule",
    "rows_of",
    "save_tensors",
    "scaled_step",
    "sends_without_gradients",
    "shapes_alone",
    "silent_nodes",
    "storage_of",
    "written",
]
