"""The divisibility rules of cuda-convnet2, R1 to R8, each a function with its own message.

A rule raises RuleError with the layer, the numbers and what would satisfy it, or returns nothing.
R2, R3, R4 and R7 are the guide's text for `rules="strict"`. By default a transfer stands in for R2 to R4, parts that
differ by one sample for R1's division of the batch, and shards of a loss exchange a few numbers per row (R7).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from parplan.errors import RuleError
from parplan.layout import split_evenly

__all__ = [
    "divisors", "parts_words", "r1_batch", "r2_feeders", "r3_fed", "r4_divides", "r5_axis", "r6_devices", "r7_loss",
    "r8_update_period",
]  # fmt: skip

# The parts of so many replicas are listed one by one.
MOST_PARTS = 8


@cache
def divisors(number: int) -> tuple[int, ...]:
    """All divisors, smallest first.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    return tuple(part for part in range(1, number + 1) if number % part == 0)


def parts_words(batch: int, replicas: int) -> str:
    """The samples of every replica, in order; of many replicas how many have each part.

    >>> parts_words(256, 3)
    '86, 85, 85'
    >>> parts_words(256, 24)
    '16 x 11, 8 x 10'
    """
    sizes = split_evenly(batch, replicas)
    if replicas <= MOST_PARTS:
        return ", ".join(map(str, sizes))
    return ", ".join(f"{sizes.count(size)} x {size}" for size in dict.fromkeys(sizes))


def r1_batch(
    layer: str,
    batch: int,
    units: int | None,
    replicas: int,
    max_replicas: int | None = None,
    unknown: Sequence[str] = (),
    why: str = "",
    uneven: bool = False,
    passes: int = 1,
) -> None:
    """R1: the batch is divisible by the layer's replicas; `units` None: its samples cannot be split.

    `max_replicas` have devices: no more are advised. `unknown` are ops of the layer that no axis is known of, `why` is
    another reason to see all samples at once. `uneven`: parts may differ by one sample, where none is empty and
    there is one pass.
    """
    if replicas == 1:
        return
    if units is None:
        reason = why or "its samples depend on each other"
        text = f"{reason}, so {replicas} replicas would change the numbers; use 1 replica"
        if unknown and not why:
            text = (
                f"parplan does not know how {' and '.join(unknown)} treats samples, so {replicas} replicas might "
                "change the numbers; use 1 replica, or describe the op with parplan.graph.axes.table.register_row"
            )
        raise RuleError("R1", layer, text)
    if uneven and passes == 1 and min(batch, units) >= replicas:
        return
    if batch % replicas or units % replicas:
        whole = batch if batch % replicas else units
        equal = f" in equal parts, which {passes} passes need" if uneven and passes > 1 else ""
        none = ", as of inputs without samples," if batch == 1 else ""
        raise RuleError(
            "R1",
            layer,
            f"a batch of {whole}{none} cannot be split over {replicas} replicas{equal}; "
            f"{_choices(whole, replicas, max_replicas)}",
        )


def r2_feeders(layer: str, feeders: Mapping[str, int]) -> None:
    """R2 (strict): all layers that feed a layer have the same number of replicas."""
    if len(set(feeders.values())) > 1:
        raise RuleError("R2", layer, f"the layers that feed it have {_counts(feeders)}; give them equal replicas")


def r3_fed(layer: str, fed: Mapping[str, int]) -> None:
    """R3 (strict): all layers that a layer feeds have the same number of replicas."""
    if len(set(fed.values())) > 1:
        raise RuleError("R3", layer, f"the layers it feeds have {_counts(fed)}; give them equal replicas")


def r4_divides(layer: str, replicas: int, fed: Mapping[str, int]) -> None:
    """R4 (strict): a layer's replicas are divisible by those of every layer it feeds."""
    for name, count in fed.items():
        if replicas % count:
            fits = " or ".join(str(part) for part in divisors(replicas))
            numbers = f"the {count} replicas of {name}, which it feeds, do not divide its {replicas}"
            raise RuleError("R4", layer, f"{numbers}; give {name} {fits}")


def r5_axis(layer: str, axis: str | None, units: Mapping[str, int], shards: int, max_shards: int | None = None) -> None:
    """R5: the cut axis exists and is divisible by the shards; `units` are the layer's axes.

    `max_shards` have devices: no more are advised.
    """
    if shards == 1:
        if axis is not None:
            raise RuleError("R5", layer, f"one shard is not cut along {axis!r}; leave the axis out")
        return
    if axis is None or axis not in units:
        known = ", ".join(f"{name} ({count})" for name, count in units.items()) or "none: it cannot be sharded"
        along = f" along {axis!r}" if axis is not None or units else f" in {shards}"
        raise RuleError("R5", layer, f"it cannot be cut{along}; its axes are {known}")
    if units[axis] % shards:
        fits = _choices(units[axis], shards, max_shards, "shards")
        raise RuleError("R5", layer, f"{units[axis]} {axis} cannot be cut in {shards}; {fits}")


def r6_devices(layer: str, replicas: int, shards: int, devices: Sequence[int], available: int) -> None:
    """R6: replicas x shards is the number of devices the layer occupies, each of them once and there."""
    if replicas * shards != len(devices):
        raise RuleError(
            "R6",
            layer,
            f"{replicas} replicas x {shards} shards need {replicas * shards} devices, it has {len(devices)}",
        )
    if len(set(devices)) != len(devices):
        raise RuleError("R6", layer, f"devices {list(devices)} name one device twice; use different logical devices")
    outside = [device for device in devices if device >= available]
    if outside:
        raise RuleError("R6", layer, f"device {outside[0]} does not exist; the plan has devices 0 to {available - 1}")


def r7_loss(layer: str, is_loss: bool, shards: int) -> None:
    """R7 (strict): a loss layer is never sharded."""
    if is_loss and shards > 1:
        raise RuleError("R7", layer, f"a loss is never sharded, the plan cuts it in {shards}; use 1 shard")


def r8_update_period(layer: str, period: int | None, passes: int) -> None:
    """R8: the update period divides the number of passes; where there is one pass, there is one update."""
    if period is not None and passes == 1 < period:
        hint = 'leave it out, or give the plan a scheme with passes ("broadcast" or "interleave")'
        raise RuleError("R8", layer, f"an update period of {period} passes, but there is one; {hint}")
    if period is not None and passes % period:
        fits = " or ".join(str(part) for part in divisors(passes))
        raise RuleError("R8", layer, f"an update period of {period} does not divide {passes} passes; use {fits}")


def _choices(number: int, wrong: int, limit: int | None, what: str = "replicas") -> str:
    near = [part for part in divisors(number) if part <= (limit or 4 * wrong)]
    below = [part for part in near if part < wrong][-2:]
    above = [part for part in near if part > wrong][:1]
    return "use " + " or ".join(str(part) for part in below + above) + f" {what}"


def _counts(replicas: Mapping[str, int]) -> str:
    return ", ".join(f"{count} ({name})" for name, count in replicas.items()) + " replicas"
