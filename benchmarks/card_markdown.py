"""The table of a GPU in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]
_COLUMNS = ("operation", "size", "forward", "backward", "of the limit", "CPU", "loop: eager")
_FIRST_PEERS = ("eager", "compile", "Liger")


def table(rows: Sequence[Row], dtype: str, copied: float, multiplied: float) -> str:
    """Return the rows of ``dtype`` as a table with one line for each operation and size.

    Args:
        rows: those of ``benchmarks.card_table``.
        copied: bytes per second of a copy.
        multiplied: floating-point operations per second of a product.
    """
    own = [row for row in rows if row["dtype"] == dtype]
    if not own:
        return f"no rows in {dtype}\n"
    others = dict.fromkeys(row["who"] for row in own if row["who"] not in ("ours", *_FIRST_PEERS))
    lines = [
        f"{own[0]['machine']}, {dtype}. A copy moves {copied / 1e12:.2f} TB/s, a bf16 product does "
        f"{multiplied / 1e12:.0f} TFLOP/s.",
        "forward, backward: of ours, ms on the GPU with a cold cache. of the limit: the share of the rate of "
        "the copy (memory-bound operations) or of the product. CPU: µs of a call of ours and of eager, with "
        "its backward. loop: the time of a call in a loop, eager / ours. Peers: the time of the peer / that "
        "of ours, forward alone / with the backward; more than 1: ours is faster.",
        "",
        _line([*_COLUMNS, *_FIRST_PEERS, "other"]),
        _line(["---"] * (len(_COLUMNS) + len(_FIRST_PEERS) + 1)),
    ]
    for name in dict.fromkeys(row["name"] for row in own):
        by_who = {row["who"]: row for row in own if row["name"] == name}
        first = next(iter(by_who.values()))
        ours, eager = by_who.get("ours", {}), by_who.get("eager", {})
        peers = [_ratio(ours, by_who.get(who)) for who in _FIRST_PEERS]
        named = [f"{who} {_ratio(ours, by_who[who])}" for who in others if who in by_who]
        lines.append(_line([first["operation"], first["size"], *_own(ours, eager), *peers, ", ".join(named)]))
    return "\n".join(lines) + "\n"


def _own(ours: Row, eager: Row) -> list[str]:
    """Return the cells that describe ours."""
    if "forward_ms" not in ours:
        return [_problem(ours), "", "", "", ""]
    shares = " / ".join("–" if share is None else f"{share:.0%}" for share in ours["shares"])
    cpu, loop = f"{ours['cpu_us']:.0f}", ""
    if "cpu_us" in eager:
        cpu += f" / {eager['cpu_us']:.0f}"
        loop = f"{eager['loop_us'] / ours['loop_us']:.2f}"
    return [f"{ours['forward_ms']:.3f}", f"{ours['backward_ms']:.3f}", shares, cpu, loop]


def _ratio(ours: Row, peer: Row | None) -> str:
    if peer is None:
        return "–"
    if "forward_ms" not in peer or "forward_ms" not in ours:
        return _problem(peer)
    forward = peer["forward_ms"] / ours["forward_ms"]
    both = (peer["forward_ms"] + peer["backward_ms"]) / (ours["forward_ms"] + ours["backward_ms"])
    return f"{forward:.2f} / {both:.2f}"


def _problem(row: Row) -> str:
    text = row.get("problem", "not measured" if not row else "measured")
    return text.partition(":")[0]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
