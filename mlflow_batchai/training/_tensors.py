"""Exchange torch tensors between ranks on their device: values, means, checksums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

# Bytes of one message, and elements of one partial checksum: what they need besides the tensors stays small.
_CHUNK = 64 * 1024 * 1024
_WORDS = 16 * 1024 * 1024


def of(variables: Sequence[Any]) -> list[Any]:
    """Return the torch tensors behind Keras variables; what is a tensor stays one."""
    return [getattr(variable, "value", variable).detach() for variable in variables]


def layout(tensors: Sequence[Any]) -> list[Any]:
    """Return how many tensors there are and their bytes on each kind of device, as JSON: ranks compare it."""
    sizes: dict[str, int] = {}
    for tensor in tensors:
        sizes[tensor.device.type] = sizes.get(tensor.device.type, 0) + _size(tensor)
    return [len(tensors), sizes]


def broadcast(hvd: Any, tensors: Sequence[Any], root_rank: int, name: str) -> None:
    """Give all ranks the root's values of tensors of any types, in place; they must have the same ``layout`` everywhere."""
    import torch

    with torch.no_grad():
        for kind, members in _by_device(tensors):
            copies = [tensor if tensor.is_contiguous() else tensor.contiguous() for tensor in members]
            for parts in _messages([_bytes(copy) for copy in copies if copy.numel()]):
                received = hvd.broadcast(torch.cat(parts), root_rank, name=f"batchai.{name}.{kind}")
                if hvd.rank() != root_rank:
                    for part, value in zip(parts, received.split([len(part) for part in parts])):
                        part.copy_(value)
            for tensor, copy in zip(members, copies):
                if copy is not tensor:
                    tensor.copy_(copy)


def average(hvd: Any, tensors: Sequence[Any], name: str) -> None:
    """Give all ranks the plain mean over the ranks of floating point tensors, in place, reckoned in doubles."""
    import torch

    with torch.no_grad():
        for kind, members in _by_device(tensors):
            flat = torch.cat([tensor.reshape(-1).double() for tensor in members])
            mean = hvd.allreduce(flat, op=hvd.Sum, name=f"batchai.{name}.{kind}") / hvd.size()
            for tensor, value in zip(members, mean.split([tensor.numel() for tensor in members])):
                tensor.copy_(value.reshape(tensor.shape))


def checksums(tensors: Sequence[Any]) -> bytes:
    """Return eight bytes for each tensor, that are the same for the same bits and otherwise almost surely not.

    A sum of the words, each times an odd number that belongs to its place, modulo 2**64: integers, so the order in which a
    device adds them up makes no difference. Only the sums leave the device, all at once.
    """
    import torch

    with torch.no_grad():
        sums: dict[int, bytes] = {}
        for _, members in _by_device(list(enumerate(tensors)), lambda pair: pair[1]):
            values = torch.stack([_checksum(tensor) for _, tensor in members]).cpu().numpy()
            sums.update({i: value.tobytes() for (i, _), value in zip(members, values)})
    return b"".join(sums[i] for i in range(len(tensors)))


def _checksum(tensor: Any) -> Any:
    import torch

    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    flat = tensor.contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    words = flat.view(kinds.get(flat.element_size(), torch.int64))
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(words), _WORDS):
        part = words[start : start + _WORDS].long()
        places = torch.arange(start, start + len(part), dtype=torch.int64, device=tensor.device)
        # Mixed bits (the constants are splitmix64's): with places themselves, differences that add up to 0 are easily met.
        factors = places.mul_(-7046029254386353131).bitwise_xor_(places >> 29).mul_(-4658895280553007687).bitwise_or_(1)
        total += (part * factors).sum()
    return total


def _by_device(tensors: Sequence[Any], tensor_of: Any = lambda tensor: tensor) -> list[tuple[str, list[Any]]]:
    groups: dict[str, list[Any]] = {}
    for item in tensors:
        groups.setdefault(tensor_of(item).device.type, []).append(item)
    return sorted(groups.items())


def _bytes(tensor: Any) -> Any:
    """Return the bytes of a contiguous tensor, which share its memory."""
    import torch

    flat = tensor.view(-1)
    return (torch.view_as_real(flat).view(-1) if flat.is_complex() else flat).view(torch.uint8)


def _size(tensor: Any) -> int:
    return int(tensor.numel()) * int(tensor.element_size())


def _messages(parts: Sequence[Any]) -> Iterator[list[Any]]:
    """Cut what is longer than a message, and put together what fits into one."""
    message: list[Any] = []
    room = _CHUNK
    for whole in parts:
        for part in whole.split(_CHUNK):
            if len(part) > room:
                yield message
                message, room = [], _CHUNK
            message.append(part)
            room -= len(part)
    if message:
        yield message
