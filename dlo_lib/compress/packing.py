"""Integers of less than 8 bits, several in a byte.

int4: two integers a byte, the first in the low half. Ternary (-1, 0, 1): four a byte with 2 bits each, or
five a byte as the digits of a number to base 3, because 3^5 = 243 <= 256:

    byte = (t_0 + 1) + 3 (t_1 + 1) + 9 (t_2 + 1) + 27 (t_3 + 1) + 81 (t_4 + 1)

Five a byte is 1.6 bits a number; the entropy of three equal values is log2(3) = 1.585 bits.

Cost: n / 2, n / 4 or n / 5 bytes for n integers, rounded up in each row.

Paper of ternary weights: BitNet b1.58 (arXiv:2402.17764).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlo_lib.base.errors import UserError, require_count


def pack_int4(q: Tensor) -> Tensor:
    """Pack integers ``q`` (..., n) from -8 to 7 to uint8 (..., ceil(n / 2)).

    Raises:
        UserError: ``q`` is no integer tensor, or an integer is out of range.
    """
    return _pack(q, -8, 7, base=16, count=2)


def unpack_int4(packed: Tensor, n: int) -> Tensor:
    """Return the integers of ``pack_int4``, int8 (..., n).

    Raises:
        UserError: ``packed`` is not uint8 of ceil(n / 2) bytes a row.
    """
    return _unpack(packed, n, -8, base=16, count=2)


def pack_ternary(q: Tensor, values_per_byte: int = 5) -> Tensor:
    """Pack integers ``q`` (..., n) from -1 to 1 to uint8 (..., ceil(n / values_per_byte)).

    Args:
        q: an integer tensor.
        values_per_byte: 4 or 5.

    Raises:
        UserError: ``q`` is no integer tensor, an integer is out of range, or ``values_per_byte`` is another.
    """
    return _pack(q, -1, 1, base=_ternary_base(values_per_byte), count=values_per_byte)


def unpack_ternary(packed: Tensor, n: int, values_per_byte: int = 5) -> Tensor:
    """Return the integers of ``pack_ternary``, int8 (..., n).

    Raises:
        UserError: ``packed`` is not uint8 of ceil(n / values_per_byte) bytes a row.
    """
    return _unpack(packed, n, -1, base=_ternary_base(values_per_byte), count=values_per_byte)


def stored_bytes(stored: nn.Module | Iterable[Tensor]) -> int:
    """Return the bytes of tensors, or of what the ``state_dict`` of a module saves.

    A storage that several tensors share counts once, as in a file, with all of its bytes. Of a subclass that
    wraps tensors, such as those of torchao, the tensors inside count.
    """
    tensors = list(stored.state_dict().values() if isinstance(stored, nn.Module) else stored)
    storages = [part.untyped_storage() for tensor in tensors for part in _parts(tensor)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for name in flatten()[0]:
        yield from _parts(getattr(tensor, name))


def _ternary_base(values_per_byte: int) -> int:
    if values_per_byte not in (4, 5):
        raise UserError(f"values_per_byte is {values_per_byte}: use 4 or 5")
    return 4 if values_per_byte == 4 else 3


def _powers(base: int, count: int, device: torch.device) -> Tensor:
    return torch.tensor([base**i for i in range(count)], dtype=torch.int32, device=device)


def _pack(q: Tensor, least: int, most: int, base: int, count: int) -> Tensor:
    if q.is_floating_point() or q.dtype == torch.bool or not q.dim():
        raise UserError(f"q is {q.dtype} of shape {tuple(q.shape)}: pack integers of at least one dimension")
    if q.numel() and not least <= int(q.min()) <= int(q.max()) <= most:
        raise UserError(f"q contains {int(q.min())} to {int(q.max())}: pack integers from {least} to {most}")
    # int4 is stored in two's complement, ternary as 0, 1, 2.
    digits = q.to(torch.int32) % 16 if base == 16 else q.to(torch.int32) - least
    padded = F.pad(digits, (0, -q.shape[-1] % count)).unflatten(-1, (-1, count))
    return (padded * _powers(base, count, q.device)).sum(-1).to(torch.uint8)


def _unpack(packed: Tensor, n: int, least: int, base: int, count: int) -> Tensor:
    require_count("n", n, least=0)
    if packed.dtype != torch.uint8 or not packed.dim() or packed.shape[-1] != -(-n // count):
        raise UserError(
            f"packed is {packed.dtype} of shape {tuple(packed.shape)}: "
            f"{n} integers are uint8 of {-(-n // count)} bytes a row"
        )
    powers = _powers(base, count, packed.device)
    digits = packed.to(torch.int32).unsqueeze(-1) // powers % base
    digits = (digits + 8) % 16 - 8 if base == 16 else digits + least
    return digits.flatten(-2)[..., :n].to(torch.int8)
