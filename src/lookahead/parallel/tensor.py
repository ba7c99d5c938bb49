"""Tensor parallelism below lookahead parallelism: one copy of the model on several devices, several such copies."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from lookahead.errors import UnsupportedModelError


def shard_model(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Share out the weights of `model` among the ranks of `mesh`, by the plan that transformers has for it.

    `from_pretrained(..., tp_plan="auto")` makes one copy of all processes of the run; this makes one of those in
    `mesh`. Each process loads the whole model first, and keeps its part.

    Args:
        model: Loaded in the same way on all ranks; changed in place.
        mesh: `ParallelGroup.tensor_mesh`.

    Raises:
        UnsupportedModelError: transformers has no plan for it.
    """
    plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=mesh.size()))
    if not plan:
        raise UnsupportedModelError(
            f"model={type(model).__name__} has no plan for tensor parallelism in transformers; join with "
            "tensor_parallel=1, so that each rank holds all of it"
        )
    apply_tensor_parallelism(model, mesh, plan)
