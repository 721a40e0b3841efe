"""AutoDP: the same ranks re-meshed in place; gradients summed over replicas; units moved between ranks."""

from pipetransformer.dp.mesh import Mesh
from pipetransformer.dp.reducer import GradientReducer
from pipetransformer.dp.transfer import Transfer, execute_transfers, plan_transfers

__all__ = ["GradientReducer", "Mesh", "Transfer", "execute_transfers", "plan_transfers"]
