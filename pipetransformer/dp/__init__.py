"""AutoDP: new process groups over the same ranks, sums of gradients over replicas, moves of units between ranks."""

from pipetransformer.dp.controller import Arrival, AutoDP
from pipetransformer.dp.lent_weights import LentWeights
from pipetransformer.dp.optimizer_state import (
    EMA,
    RECENT,
    OptimizerState,
    give_state,
    make_optimizer,
    state_factor,
    take_state,
)
from pipetransformer.dp.reducer import GradientReducer
from pipetransformer.dp.transfer import Holders, Transfer, execute_transfers, transfers_of

__all__ = [
    "EMA",
    "RECENT",
    "Arrival",
    "AutoDP",
    "GradientReducer",
    "Holders",
    "LentWeights",
    "OptimizerState",
    "Transfer",
    "execute_transfers",
    "give_state",
    "make_optimizer",
    "state_factor",
    "take_state",
    "transfers_of",
]
