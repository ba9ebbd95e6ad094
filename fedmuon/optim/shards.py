"""Matrices that several processes store in parts, as `torch.distributed.fsdp.fully_shard` does.

The parameters, gradients and momenta of such a model are DTensors: each process stores a part. A
rule that acts on each entry, such as AdamW or a momentum, works on the parts. Muon needs the whole
matrix. Therefore each process gathers the direction from all processes, computes the whole update,
and applies its own part of the update. All processes compute the same update, so that nothing else
is sent. The gathered matrix is discarded after the step.

`FullyShardedDataParallel`, the predecessor of `fully_shard`, and stage 3 of DeepSpeed store flat
parts without the shape of the matrix. Nothing here can gather these parts.
"""

from typing import Any

from torch import Tensor, nn

from fedmuon.core.errors import InputError

FIX = (
    "Shard the model with torch.distributed.fsdp.fully_shard, whose parameters keep their shapes, "
    "or train it with DistributedDataParallel."
)


def is_shared(tensor: Tensor) -> bool:
    """Return whether the tensor is a DTensor, without importing torch.distributed."""
    return hasattr(tensor, "full_tensor")


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process stores, as a view."""
    shared: Any = tensor
    return shared.to_local() if is_shared(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor. All processes must call this function in the same order."""
    shared: Any = tensor
    return shared.full_tensor() if is_shared(tensor) else tensor


def aligned(gradient: Tensor, param: Tensor) -> Tensor:
    """Return the gradient, divided among the processes as the parameter."""
    shared: Any = gradient
    target: Any = param
    if not is_shared(gradient) or shared.placements == target.placements:
        return gradient
    return shared.redistribute(placements=target.placements)


def like(part: Tensor, param: Tensor) -> Tensor:
    """Return a DTensor with these parts, divided among the processes as the parameter."""
    if not is_shared(param):
        return part
    from torch.distributed.tensor import DTensor  # takes 0.5 s to import

    shared: Any = param
    return DTensor.from_local(
        part, shared.device_mesh, shared.placements,
        run_check=False, shape=param.shape, stride=param.stride(),
    )  # fmt: skip


def part_of(tensor: Tensor, param: Tensor) -> Tensor:
    """Return the part of a whole tensor that this process stores of the parameter."""
    if not is_shared(param):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    shared: Any = param
    mesh = shared.device_mesh
    copies = [Replicate()] * mesh.ndim
    part: Any = DTensor.from_local(tensor, mesh, copies, run_check=False)
    return part.redistribute(placements=shared.placements).to_local()


def require_matrices(model: nn.Module) -> None:
    """Raise an error if the parameters of a model are flat parts of matrices."""
    for layer in model.modules():
        if type(layer).__name__ == "FullyShardedDataParallel":
            raise InputError(
                "the model is a FullyShardedDataParallel, which stores flat parts of matrices, "
                f"but Muon needs whole matrices. {FIX}"
            )
    if any(hasattr(param, "ds_shape") for param in model.parameters()):
        raise InputError(
            "the model is divided by stage 3 of DeepSpeed, which stores flat parts of matrices, "
            f"but Muon needs whole matrices. {FIX}"
        )


def require_matrix(param: Tensor) -> None:
    """Raise an error if a matrix of Muon is, or has become, a flat part of a matrix."""
    if param.ndim < 2:
        raise InputError(
            f"a parameter of Muon has the shape {tuple(param.shape)}. If this was a matrix, "
            f"another library divided it into flat parts, but Muon needs whole matrices. {FIX}"
        )
