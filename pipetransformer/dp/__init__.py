"""AutoDP: new process groups over the same ranks, sums of gradients over replicas, moves of units between ranks."""

from pipetransformer.dp.controller import Arrival, AutoDP
from pipetransformer.dp.mesh import Mesh
from pipetransformer.dp.optimizer_state import OptimizerState, empty_state, state_keys, take_state
from pipetransformer.dp.reducer import GradientReducer
from pipetransformer.dp.transfer import Transfer, execute_transfers, plan_transfers

__all__ = [
    "Arrival",
    "AutoDP",
    "GradientReducer",
    "Mesh",
    "OptimizerState",
    "Transfer",
    "empty_state",
    "execute_transfers",
    "plan_transfers",
    "state_keys",
    "take_state",
]
