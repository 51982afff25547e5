"""`--plan`: everything that a run would decide, each with its reason, without training and without a folder made."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hf_mps import settings
from hf_mps.choice import Choice
from hf_mps.errors import UserError
from hf_mps.finetune import checkpoint, data, folder, runner
from hf_mps.finetune import order as orders
from hf_mps.finetune.files import plain

if TYPE_CHECKING:
    from hf_mps.finetune.order import Order
    from hf_mps.finetune.task import Prepared

UNKNOWN = "not known"


def show(name: str, overrides: Sequence[str] = (), *, fresh: bool = False, as_json: bool = False) -> dict[str, Any]:
    """Print the plan of a run as its header would have it, or as JSON, and return what the JSON says.

    - `name`, `recipe`: as in results.json
    - `choices`: {name: {"value": any, "reason": str}}, among them `parameters` and `operators`
    - `parameters`: {"trainable": int, "frozen": int}; `buckets`: [int], the lengths that batches are padded to

    Raises UserError for what a run would refuse.
    """
    settings.refuse_unknown()
    order = orders.load(name, overrides)
    data.check(order.recipe.data)
    source = checkpoint.resolve(order.recipe.model)
    place = folder.choose(order, fresh=fresh)
    from hf_mps import activate
    from hf_mps.finetune import training
    from hf_mps.finetune.quiet import no_bars

    activate.activate()
    with no_bars():
        device, prepared = runner.prepare(order, source)
        planned = runner.plan(order, device, prepared, place.path, place)
        training.arguments(planned.plan, prepared)
        found = _foreseen(order, prepared)
    plan = dataclasses.replace(planned.plan, choices=planned.plan.choices | found)
    trainable, frozen = _parameters(prepared.model)
    content = {
        "name": order.name,
        "recipe": order.recipe.model_dump(exclude_none=True),
        "choices": plan.shown(),
        "parameters": {"trainable": trainable, "frozen": frozen},
        "buckets": list(getattr(plan.choices["lengths"].value, "shapes", ())) if "lengths" in plan.choices else [],
    }
    result: dict[str, Any] = plain(content)
    if as_json:
        print(json.dumps(result, indent=2, ensure_ascii=False))
    else:
        runner.header(order, plan, verb="plan of")
    return result


def _foreseen(order: Order, prepared: Prepared) -> dict[str, Choice[Any]]:
    """What a run will need that only shows once it runs."""
    trainable, frozen = _parameters(prepared.model)
    share = f"{trainable / max(1, trainable + frozen):.1%} of {type(prepared.model).__name__}'s are trained"
    return {
        "parameters": Choice(f"{trainable:,} trainable, {frozen:,} frozen", share),
        "operators": _operators(order),
    }


def _parameters(model: Any) -> tuple[int, int]:
    """The number of trainable and of frozen parameters, each counted once where two layers share it."""
    counts = [0, 0]
    for parameter in model.parameters():
        counts[not parameter.requires_grad] += parameter.numel()
    return counts[0], counts[1]


def _operators(order: Order) -> Choice[Any]:
    """The operators of a training step that have no Metal kernel; those that the recipe names are marked."""
    from hf_mps.audit import audit
    from hf_mps.target.find import Target

    try:
        found = audit(Target(order.name, order, order.words))
    except UserError as error:
        return Choice(UNKNOWN, str(error))
    lacking = [
        f"{entry.operator} (as the recipe names it)" if entry.operator in order.recipe.fallback else entry.operator
        for entry in found.found
    ]
    reason = f"of {len(found.entries)} in a training step; with their places: hf-mps audit {order.name}"
    return Choice(f"without a Metal kernel: {', '.join(lacking)}" if lacking else "all have a Metal kernel", reason)
