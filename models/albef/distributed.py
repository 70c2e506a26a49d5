"""What ALBEF needs from other processes. Every function is the identity where there is no process group."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F


def process_rank() -> int:
    """The rank of this process, 0 without a process group."""
    return dist.get_rank() if _together() else 0


def process_count() -> int:
    """How many processes there are, 1 without a process group."""
    return dist.get_world_size() if _together() else 1


def own_rows(tensor: Tensor) -> Tensor:
    """The part (B, ...) that is this process's of all processes' rows (world * B, ...) in rank order."""
    return tensor.chunk(process_count())[process_rank()]


@torch.no_grad()
def mean_over_processes(count: Tensor) -> Tensor:
    """A number (any shape) averaged over all processes, float32."""
    mean = count.float().clone()
    if _together():
        dist.all_reduce(mean)
    return mean / process_count()


def longest_of_all(length: int, device: torch.device) -> int:
    """The largest of all processes' lengths."""
    if not _together():
        return length
    longest = torch.tensor(length, device=device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return int(longest)


@torch.no_grad()
def gather_rows(tensor: Tensor) -> Tensor:
    """The rows of all processes in rank order: (B, ...) to (world * B, ...), no gradient. Shapes must agree."""
    return _all_gather(tensor) if _together() else tensor


def gather_rows_with_grad(tensor: Tensor) -> Tensor:
    """As `gather_rows`, and each process's rows receive the gradients of all processes' losses (their sum)."""
    if not _together():
        return tensor
    gathered: Tensor = _GatherWithGrad.apply(tensor)
    return gathered


def pad_to_longest(tensor: Tensor) -> Tensor:
    """Pad dimension 1 with zeros to the longest of all processes, so that rows of texts can be gathered."""
    missing = longest_of_all(tensor.shape[1], tensor.device) - tensor.shape[1]
    return F.pad(tensor, (0, 0) * (tensor.ndim - 2) + (0, missing))


class _GatherWithGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.rows = tensor.shape[0]
        return _all_gather(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        total = gradient.contiguous().clone()
        dist.all_reduce(total)
        start = dist.get_rank() * ctx.rows
        return total[start : start + ctx.rows]


def _all_gather(tensor: Tensor) -> Tensor:
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts)


def _together() -> bool:
    return dist.is_available() and dist.is_initialized()
